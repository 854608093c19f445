"""The daemon's device pools as this process has them mapped."""
