"""A small real transformer whose keys and values live in cache pages: the demo's engine, and the tests'.

It is a test model and no product: every attention family in a few hundred lines of NumPy, so that a wrong page, a stale
page or a missing row changes a bit of an answer. Copy `examples/engine.py` and `batching.py`, not this.
"""
