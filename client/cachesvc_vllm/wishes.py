"""Matches that requests ask for: their length, and the salt that stands for what else their KV depends on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cachesvc_client import Expected, Registration
from cachesvc_client.core.keys import tail_digest
from cachesvc_client.plugins.request_pages import Tail, Wish

from cachesvc.model.words import KEY_BYTES
from cachesvc_vllm.adapters import Adapters
from cachesvc_vllm.handover import expected_of, hands_over, retention_of
from cachesvc_vllm.kv_events import Announcer
from cachesvc_vllm.media import Media, Sharing
from cachesvc_vllm.plain import LookaheadKeys
from cachesvc_vllm.settings import Settings
from cachesvc_vllm.vllm_objects import Request

AHEAD_DIVISOR = 8
"""Largest part of the pool that waiting requests get ahead of their turn: other engines want it too."""


def blocks_ahead(step_tokens: int, registration: Registration) -> int:
    """Return the number of blocks up to which waiting requests are matched and given pages together."""
    layout = registration.layout
    row_pages = max(1, len(layout.own_groups) - len(layout.state_groups))
    return min(step_tokens // layout.block_tokens, registration.device_pages[0] // (AHEAD_DIVISOR * row_pages))


class Wishes:
    """``step_tokens``: the most that vLLM schedules in an iteration. ``announcer``: notes the keys of each wish; None:
    there are no KV events. ``adapters``, ``weights_salt``: of the engine. ``in_towers``: see ``Media``. ``has_whole``:
    a hit may have all blocks of a request (``RequestPages.tail``). ``has_tails``: those, too, that end within a block,
    where they are handed over."""

    def __init__(
        self,
        keys: LookaheadKeys,
        settings: Settings,
        announcer: Announcer | None,
        step_tokens: int,
        block_tokens: int,
        *,
        adapters: Adapters,
        weights_salt: Callable[[], bytes],
        in_towers: bool = False,
        has_whole: bool = False,
        has_tails: bool = False,
    ) -> None:
        self._keys = keys
        self._media = Media(Sharing(settings.share_media), weights_salt, keys.forget, in_towers=in_towers)
        self._announcer = announcer
        self._step_tokens = step_tokens
        self._block_tokens = block_tokens
        self._has_whole = has_whole
        self._has_tails = has_tails
        self._patience_s = settings.remote_patience_ms / 1000
        self._adapters = adapters
        self._kept: dict[str, tuple[tuple[int, int | None, bool], Wish]] = {}

    def of(self, request: Request, most_tokens: int | None, *, may_hit: bool) -> Wish | None:
        """Return what a request is matched for, at most ``most_tokens`` of it; None while what it computes with
        is not known. A request that waits is asked for in each iteration: one without adapter keeps its last match."""
        asked = int(request.num_tokens), most_tokens, may_hit
        kept = self._kept.get(request.request_id)
        if kept is not None and kept[0] == asked:
            wish: Wish | None = kept[1]
        else:
            wish = self._make(request, most_tokens, may_hit=may_hit)
            if wish is not None and request.lora_request is None:
                self._kept[request.request_id] = asked, wish
        if wish is not None and self._announcer is not None:
            self._announcer.note(request, wish.hashes, wish.salt)
        return wish

    def forget(self, request_id: str) -> None:
        self._kept.pop(request_id, None)
        self._media.forget(request_id)

    def reset(self) -> None:
        """Use no salt again that was chosen before."""
        self._kept.clear()
        self._adapters.forget()
        self._media.reset()

    def is_salted_by(self, loaded: Mapping[int, bytes], request: Request, salt: bytes) -> bool:
        """True where ``salt`` is that of a request's adapter, as it was ``loaded``: salts by the adapters' numbers."""
        assert request.lora_request is not None
        known = loaded.get(request.lora_request.lora_int_id)
        return known is not None and self._media.agrees(request, known, salt)

    def _make(self, request: Request, most_tokens: int | None, *, may_hit: bool) -> Wish | None:
        salt = self._adapters.salt(request.lora_request)
        if salt is None:
            return None
        if (mixed := self._media.salt(request, salt)) is None:
            return None
        salt = mixed
        keys = self._keys.of(request)
        first = -(-min(request.num_tokens, self._step_tokens) // self._block_tokens)
        expected, retention = expected_of(request, self._patience_s, self._block_tokens), retention_of(request)
        if may_hit and most_tokens is None and (tail := self._tail(request, keys, expected)) is not None:
            blocks, free = request.num_tokens // self._block_tokens + 1, self._block_tokens - tail.tokens
            whole = Wish(keys, blocks, first, salt, expected, retention, blocks)
            return replace(whole, tail=tail, free_tokens=free, seals_tail=hands_over(request))
        blocks = self._whole_blocks(request) if may_hit and most_tokens is None else 0
        tokens = request.num_tokens - (not blocks) if most_tokens is None else most_tokens
        most = min(tokens // self._block_tokens, len(keys)) if may_hit else 0
        return Wish(keys, most, first, salt, expected if most else None, retention, blocks)

    def tail_keys(self, request: Request) -> Sequence[bytes]:
        """Keys of a prompt's blocks with its tail's, of a request that has computed exactly these and hands them over;
        else none."""
        is_exact = request.num_computed_tokens == request.num_prompt_tokens and not request.num_in_flight_tokens
        if not (self._has_tails and is_exact and hands_over(request)):
            return ()
        keys, tail = self._keys.of(request), tail_of(request, self._keys.of(request), self._block_tokens)
        return () if tail is None else [*keys[: request.num_prompt_tokens // self._block_tokens], tail.key]

    def _tail(self, request: Request, keys: Sequence[bytes], expected: Expected | None) -> Tail | None:
        """The tail that a prompt may find: the same one was handed over before, or now it is."""
        if not self._has_tails:
            return None
        follows = expected is not None and not expected.is_computed and expected.blocks == len(keys)
        comes = hands_over(request) or follows or (expected is not None and not expected.blocks)
        is_prompt = request.num_tokens == request.num_prompt_tokens
        return tail_of(request, keys, self._block_tokens) if comes and is_prompt else None

    def _whole_blocks(self, request: Request) -> int:
        """Number of blocks of a request that ends with one, where a hit may have all of them."""
        is_whole = self._has_whole and not request.num_tokens % self._block_tokens
        return request.num_tokens // self._block_tokens if is_whole else 0

    def close(self) -> None:
        self._media.close()


# Key of a prompt's last block where it is not full: a prefilling engine seals it, and a decoding one copies it.
#
#   key of the tail = H("kv-tail", key of the block before, tokens of a block, the tail's tokens, vLLM's other keys)
#
# No full block has such a key, nor a tail of other tokens or another length. An adapter, an image or a salt is in it as
# in the keys of full blocks: by vLLM's extra keys, and by the salts that all keys of a request are mixed with.

LEAST_TOKENS = 2
"""Tokens of a tail that is of use: the last token of a prompt is computed always."""


def tail_of(request: Request, keys: Sequence[bytes], block_tokens: int) -> Tail | None:
    """Return the tail of a request's prompt, ``keys`` being those of its full blocks; None where it has none, or one
    that is of no use."""
    end = request.num_prompt_tokens
    first = end - end % block_tokens
    if end - first < LEAST_TOKENS:
        return None
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    extra, _ = generate_block_hash_extra_keys(request, first, end, 0)
    parent = keys[first // block_tokens - 1] if first else bytes(KEY_BYTES)
    tokens = request.all_token_ids[first:end]
    return Tail(tail_digest(parent, block_tokens, tokens, repr(extra).encode()), end - first)


log = logging.getLogger(__name__)
