"""Device memory in shared memory of the host."""
