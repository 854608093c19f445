"""The tier over an engine: what is asked of it, how far it is trusted, and what it may hold."""
