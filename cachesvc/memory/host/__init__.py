"""The host pool."""
