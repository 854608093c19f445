"""The event loop: whose turn it is, and for how long."""
