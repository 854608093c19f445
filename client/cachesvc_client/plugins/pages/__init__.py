"""Pages of an engine's requests."""
