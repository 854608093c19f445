"""Parts that every command needs."""
