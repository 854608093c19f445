"""Adapters to the protocols of other systems, one file each."""
