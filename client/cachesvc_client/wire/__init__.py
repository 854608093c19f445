"""The way to the daemon: channel, calls, messages, credentials, liveness."""
