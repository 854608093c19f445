"""vLLM's KV cache in place on the daemon's pages: ``CachesvcConnector``, loaded by ``--kv-transfer-config``.

vLLM is needed by whoever asks for the connector, not by whoever imports this package.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CachesvcConnector"]


def __getattr__(name: str) -> Any:
    if name != "CachesvcConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cachesvc_vllm.connector import CachesvcConnector

    return CachesvcConnector
