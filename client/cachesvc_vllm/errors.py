"""What keeps an engine from starting on the daemon's pages, in words for its operator."""

from __future__ import annotations


class ConnectorRefused(ValueError):
    """The engine is configured in a way that the connector cannot serve; the message says what works instead."""
