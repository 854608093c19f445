"""The node cache daemon."""
