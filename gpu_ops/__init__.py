"""CUDA for the daemon and its clients: memory, sharing between processes, copy engines, stream words.

A leaf: it knows no cache, and needs neither CuPy nor a toolkit.
"""
