"""Pages of vLLM's requests."""
