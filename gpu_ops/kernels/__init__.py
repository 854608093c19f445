"""Kernels that engines run on their own streams, each with its launch and its NumPy oracle."""
