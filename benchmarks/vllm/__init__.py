"""vLLM on the daemon's pages."""
