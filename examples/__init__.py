"""Small programs that show the daemon at work."""
