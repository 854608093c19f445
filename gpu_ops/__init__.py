"""CUDA memory, streams, IPC and copies, and the kernels that engines run."""
