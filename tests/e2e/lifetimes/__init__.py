"""Ends and starts of processes."""
