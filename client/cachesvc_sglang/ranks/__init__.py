"""Tensor parallelism: a scheduler for each rank, of which the first one decides."""
