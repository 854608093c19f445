"""Several GPUs at once, and kernels."""
