"""Settings of ``kv_connector_extra_config``: read once, checked, refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from cachesvc_client.plugins.keeper import ConnectorRefused
from cachesvc_client.plugins.node import Flags

DRAFT_BLOCKS = ("lookahead", "drop")
FLAGS = Flags("vllm", "--num-gpu-blocks-override", unit=1, padding=0, longest="--max-model-len")
MOST_PATIENCE_MS = 600_000
"""Longest wait without progress that a daemon keeps; a longer one would end there, and the setting would not say so."""


@dataclass(frozen=True, slots=True)
class Settings:
    """``socket``: of the daemon; None: as every client, by CACHESVC_SOCKET. ``required``: without a daemon at the start
    the engine does not start; False: it goes on with vLLM's own memory and pool, and shares nothing.

    ``weights_version``: of the weights that the engine starts with; they change only with an announcement.
    ``model``: names the weights instead of a digest of their files. ``tenant_salt``: a tenant's secret. ``token_file``:
    where the daemon wants tokens. ``host_blocks``: the host pool asked for by the first engine of the model, in blocks;
    None: all that is left, 0: none. ``stock_blocks``: pages kept at hand for decode, and what an engine can go on with
    when the daemon has gone. ``draft_blocks``: how the last block of a hit is shared, whose drafter's KV depends on the
    next token: ``lookahead`` keys cover that token, ``drop`` computes the block again. ``verify_steps``: for debugging,
    how many iterations lie between two checks of all sealed pages; 0: none. ``allow_untested_vllm``: see ``versions``.
    ``share_media``: None: requests with images, video or sound are shared by the content that the engine has of them;
    True: by their names, where these look like a hash of content, though a client gave them; False: with no other
    engine. ``share_loaded``: what another connector of a MultiConnector loads is shared as if this engine had computed
    it; False: with no other engine. ``remote_patience_ms``: how long without progress a request waits for what a router
    says that another node computes.
    """

    socket: str | None = None
    required: bool = True
    model: str | None = None
    tenant_salt: str = ""
    token_file: str | None = None
    host_blocks: int | None = None
    stock_blocks: int = 64
    weights_version: str = ""
    draft_blocks: str = "lookahead"
    verify_steps: int = 0
    allow_untested_vllm: bool = False
    share_media: bool | None = None
    share_loaded: bool = True
    remote_patience_ms: int = 10_000

    def __post_init__(self) -> None:
        for each in fields(self):
            value, kind = getattr(self, each.name), _KINDS[each.name]
            if type(value) is not kind and not (value is None and each.default is None):
                raise ConnectorRefused(f"kv_connector_extra_config: {each.name} is {kind.__name__}, got {value!r}")
        if self.draft_blocks not in DRAFT_BLOCKS:
            kinds = " or ".join(DRAFT_BLOCKS)
            raise ConnectorRefused(f"kv_connector_extra_config: draft_blocks is {kinds}, got {self.draft_blocks!r}")
        if self.stock_blocks < 1:
            raise ConnectorRefused(f"kv_connector_extra_config: stock_blocks is at least 1, got {self.stock_blocks}")
        if self.verify_steps < 0:
            raise ConnectorRefused(f"kv_connector_extra_config: verify_steps is not negative, got {self.verify_steps}")
        if not 1 <= self.remote_patience_ms <= MOST_PATIENCE_MS:
            raise ConnectorRefused(
                f"kv_connector_extra_config: remote_patience_ms is 1 to {MOST_PATIENCE_MS}, got "
                f"{self.remote_patience_ms}"
            )
        if self.host_blocks is not None and self.host_blocks < 0:
            raise ConnectorRefused(f"kv_connector_extra_config: host_blocks is not negative, got {self.host_blocks}")


_KINDS: dict[str, type] = {
    "socket": str,
    "required": bool,
    "model": str,
    "tenant_salt": str,
    "token_file": str,
    "host_blocks": int,
    "stock_blocks": int,
    "weights_version": str,
    "draft_blocks": str,
    "verify_steps": int,
    "allow_untested_vllm": bool,
    "share_media": bool,
    "share_loaded": bool,
    "remote_patience_ms": int,
}


def read_settings(extra_config: Mapping[str, Any]) -> Settings:
    """The settings of ``kv_connector_extra_config``. Raises ConnectorRefused for what is none, or not of its type."""
    if unknown := sorted(set(extra_config) - set(_KINDS)):
        raise ConnectorRefused(
            f"kv_connector_extra_config has {', '.join(unknown)}; what can be set is {', '.join(_KINDS)}"
        )
    return Settings(**extra_config)
