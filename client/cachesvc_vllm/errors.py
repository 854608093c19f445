"""Errors that keep an engine from starting on the daemon's pages, worded for its operator."""

from __future__ import annotations


class ConnectorRefused(ValueError):
    """The engine is configured in a way that the connector cannot serve; the message says what works instead."""


STUCK = (
    "the daemon is gone or took this engine's lease, what is asked for needs pages that are not the engine's own, and "
    "its memory cannot be replaced: start it again; with --device-memory vmm the daemon's next memory takes its place"
)
"""Process exit of an engine that cannot serve any more; its supervisor restarts it."""

NOT_FIRST = (
    "another connector of the MultiConnector loads a request into pages that the daemon loads too: name "
    "CachesvcConnector first among its connectors"
)
