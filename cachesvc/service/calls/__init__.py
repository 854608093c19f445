"""The way of every call, whatever it came by."""
