"""The calls of an engine."""
