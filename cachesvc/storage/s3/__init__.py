"""The storage engine ``s3``: objects in a bucket of an S3-compatible store, which daemons of any node share.

``client.py`` alone knows the library (obstore). What expires in the bucket is its lifecycle rules' affair: this engine
evicts nothing. docs/storage-s3.md is for operators.
"""
