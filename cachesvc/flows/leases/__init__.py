"""Leases, their end, and lost devices."""
