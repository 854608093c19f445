"""Rights of callers and their shares."""
