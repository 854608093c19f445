"""Tests of ``gpu_ops`` that need no GPU."""
