"""The host, storage and other nodes."""
