"""Simulations of a trace, without a daemon."""
