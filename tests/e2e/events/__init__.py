"""Events of a daemon."""
