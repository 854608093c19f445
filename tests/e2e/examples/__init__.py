"""The examples as a newcomer runs them."""
