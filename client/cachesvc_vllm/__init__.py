"""vLLM's KV cache in place on the daemon's pages: ``CachesvcConnector``, loaded by ``--kv-transfer-config``.

Only a use of the connector needs vLLM; importing this package does not.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CachesvcConnector"]


def __getattr__(name: str) -> Any:
    if name != "CachesvcConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cachesvc_vllm.connector import CachesvcConnector

    return CachesvcConnector
