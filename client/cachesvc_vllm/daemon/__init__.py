"""The connection of a vLLM process to its daemon."""
