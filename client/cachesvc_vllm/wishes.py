"""Matches that requests ask for: their length, and the salt that stands for what else their KV depends on."""

from __future__ import annotations

from cachesvc_client import Registration
from cachesvc_client.plugins.pages.request_pages import Wish
from vllm.lora.utils import get_adapter_absolute_path

from cachesvc_vllm.daemon.settings import Settings
from cachesvc_vllm.daemon.vllm_objects import Request
from cachesvc_vllm.handover import expected_of, retention_of
from cachesvc_vllm.kv_events import Announcer
from cachesvc_vllm.namespace.adapters import Adapters
from cachesvc_vllm.namespace.draft_keys import LookaheadKeys
from cachesvc_vllm.namespace.media import Media

AHEAD_DIVISOR = 8
"""Largest part of the pool that waiting requests get ahead of their turn: other engines want it too."""


def blocks_ahead(step_tokens: int, registration: Registration) -> int:
    """Return the number of blocks up to which waiting requests are matched and given pages together."""
    layout = registration.layout
    row_pages = len(layout.own_groups) - len(layout.state_groups)
    return min(step_tokens // layout.block_tokens, registration.device_pages[0] // (AHEAD_DIVISOR * row_pages))


class Wishes:
    """``step_tokens``: the most that vLLM schedules in an iteration. ``announcer``: notes the keys of each wish; None:
    there are no KV events. ``has_tails``: a hit may have all blocks of a request (``RequestPages.tail``)."""

    def __init__(
        self,
        keys: LookaheadKeys,
        settings: Settings,
        announcer: Announcer | None,
        step_tokens: int,
        block_tokens: int,
        *,
        has_tails: bool = False,
    ) -> None:
        self._keys = keys
        self._media = Media(is_shared=settings.share_media)
        self._announcer = announcer
        self._step_tokens = step_tokens
        self._block_tokens = block_tokens
        self._has_tails = has_tails
        self._patience_s = settings.remote_patience_ms / 1000
        self._adapters = Adapters(get_adapter_absolute_path)

    def of(self, request: Request, most_tokens: int | None, *, may_hit: bool) -> Wish | None:
        """Return what a request is matched for, at most ``most_tokens`` of it; None while its adapter is read."""
        salt = self._adapters.salt(request.lora_request)
        if salt is None:
            return None
        salt = self._media.salt(request.mm_features, salt)
        keys = self._keys.of(request)
        if self._announcer is not None:
            self._announcer.note(request, keys, salt)
        whole = self._whole_blocks(request) if may_hit and most_tokens is None else 0
        tokens = request.num_tokens - (not whole) if most_tokens is None else most_tokens
        most = min(tokens // self._block_tokens, len(keys)) if may_hit else 0
        first = -(-min(request.num_tokens, self._step_tokens) // self._block_tokens)
        expected = expected_of(request, self._patience_s, self._block_tokens) if most else None
        return Wish(keys, most, first, salt, expected, retention_of(request), whole)

    def _whole_blocks(self, request: Request) -> int:
        """Number of blocks of a request that ends with one, where a hit may have all of them."""
        is_whole = self._has_tails and not request.num_tokens % self._block_tokens
        return request.num_tokens // self._block_tokens if is_whole else 0

    def close(self) -> None:
        """Read no more adapters. Idempotent."""
        self._adapters.close()
