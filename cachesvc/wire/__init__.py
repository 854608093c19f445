"""The model's words on the wire: conversions, status codes, sizes. Shared by the daemon and its clients."""
