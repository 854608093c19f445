"""Replays of a trace against real daemons."""
