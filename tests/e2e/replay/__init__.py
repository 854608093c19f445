"""Replays, simulations and benchmarks."""
