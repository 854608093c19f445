"""Tests of ``cachesvc.telemetry``."""
