"""Engines and a daemon under load, and what is done to them: shared by the soak, the daemon kills and tests/chaos."""
