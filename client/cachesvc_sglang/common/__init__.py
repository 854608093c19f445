"""Parts of an engine's cache that all of its ranks have."""
