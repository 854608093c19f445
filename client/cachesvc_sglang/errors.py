"""Errors that keep an SGLang engine from starting or going on."""

from __future__ import annotations

from cachesvc_client.plugins.daemon.errors import ConnectorRefused


class EngineRefused(ConnectorRefused):
    """The engine is configured in a way that the plugin cannot serve; the message says what works instead."""
