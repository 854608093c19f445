"""Telemetry of the daemon: events with constant names."""
