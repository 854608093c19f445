"""Transports of calls that block."""
