"""Storage and other nodes."""
