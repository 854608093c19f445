"""Block keys of engines with a drafter: they cover the tokens behind a block that its drafter's KV depends on.

EAGLE-like drafters compute their KV at a position from the target's hidden state there and from the next token. So the
last position of a block is right for one continuation only. vLLM drops the last block of each hit for that reason, or,
since 0.33 and without a connector, hashes the next tokens too. Here the connector does the latter:

    key of block i = H(vLLM's hash of block i, the next L tokens)      L: tokens that the drafter reads ahead

A block is sealed once these tokens are known and verified, and no block of a hit is dropped. Keys stay prefix-closed:
the hash of block i + 1 covers the tokens that the key of block i looks ahead to, as long as L is at most a block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cachesvc_client.plugins.daemon.errors import ConnectorRefused

from cachesvc.model.keys import KEY_BYTES
from cachesvc_vllm.daemon.vllm_objects import HashedRequest, Request, VllmConfig

PERSON = b"kv-lookahead"

ExtraKeys = Callable[[Any, int, int], object]
"""``extra_keys(request, first, end)``: what vLLM hashes of these tokens beside their ids (images, embeddings)."""


def draft_lookahead(vllm_config: VllmConfig) -> int:
    """Return how many tokens behind a position its drafter's KV depends on; 0 without such a drafter."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle():
        return 0
    return int(vllm_config.num_prefill_lookahead_tokens)


def drafts_with_kv(vllm_config: VllmConfig) -> bool:
    """Return True where a drafter has KV of its own: its kernels may run on when a step's output has come."""
    speculative = vllm_config.speculative_config
    return speculative is not None and bool(speculative.uses_draft_kv_cache())


def extra_keys_of(request: Request, first: int, end: int) -> object:
    """Ask vLLM for what it hashes of tokens beside their ids. Requests without images and embeddings have nothing."""
    if not request.mm_features and request.prompt_embeds is None:
        return None
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    return generate_block_hash_extra_keys(request, first, end, 0)[0]


@dataclass(slots=True)
class _Known:
    """Keys of one request. ``last_tokens``: what the last key looks ahead to."""

    keys: list[bytes] = field(default_factory=list)
    last_tokens: list[int] = field(default_factory=list)


class LookaheadKeys:
    """Keys of requests, each computed once. With ``lookahead_tokens`` 0 they are vLLM's hashes, of which blocks of
    ``hashes_a_block`` have the last one: it stands for all before it.

    Used from vLLM's scheduler thread. ``forget`` a request that has ended. Raises ConnectorRefused where the drafter
    reads further ahead than a block.
    """

    def __init__(self, lookahead_tokens: int, block_tokens: int, extra_keys: ExtraKeys = extra_keys_of) -> None:
        if lookahead_tokens > block_tokens:
            raise ConnectorRefused(
                f"cachesvc_vllm: the drafter reads {lookahead_tokens} tokens ahead, more than a block has "
                f"({block_tokens}): take larger blocks (--block-size) or fewer speculative tokens"
            )
        self._lookahead = lookahead_tokens
        self._block_tokens = block_tokens
        self._extra_keys = extra_keys
        self._known: dict[str, _Known] = {}
        self.hashes_a_block = 1

    def of(self, request: HashedRequest) -> Sequence[bytes]:
        """Return the keys of the request's leading full blocks whose lookahead tokens are known."""
        hashes: Sequence[bytes] = request.block_hashes
        if self.hashes_a_block > 1:
            hashes = hashes[self.hashes_a_block - 1 :: self.hashes_a_block]
        if not self._lookahead:
            return hashes
        tokens = request.all_token_ids
        count = min(len(hashes), (len(tokens) - self._lookahead) // self._block_tokens)
        known = self._known.setdefault(request.request_id, _Known())
        if known.keys and (len(known.keys) > count or self._ahead(tokens, len(known.keys) - 1) != known.last_tokens):
            known = self._known[request.request_id] = _Known()  # its last tokens were replaced
        for block in range(len(known.keys), count):
            known.last_tokens = self._ahead(tokens, block)
            known.keys.append(self._key(request, block, hashes[block], known.last_tokens))
        return known.keys

    def forget(self, request_id: str) -> None:
        """Drop the keys of a request. Idempotent."""
        self._known.pop(request_id, None)

    def _ahead(self, tokens: Sequence[int], block: int) -> list[int]:
        end = (block + 1) * self._block_tokens
        return list(tokens[end : end + self._lookahead])

    def _key(self, request: HashedRequest, block: int, block_hash: bytes, ahead: list[int]) -> bytes:
        digest = hashlib.blake2b(block_hash, digest_size=KEY_BYTES, person=PERSON)
        digest.update(array("q", ahead).tobytes())
        end = (block + 1) * self._block_tokens
        extra = self._extra_keys(request, end, end + self._lookahead)
        if extra is not None:
            digest.update(repr(extra).encode())
        return digest.digest()


def keep_last_blocks(coordinator: Any) -> None:
    """Have vLLM take whole hits: the connector's keys cover the next tokens, or it leaves out the last block itself."""
    if hasattr(coordinator, "drop_eagle_group_ids"):  # 0.33
        coordinator.drop_eagle_group_ids = set()
    else:
        coordinator.eagle_group_ids = set()
    if hasattr(coordinator, "attention_groups"):  # several groups
        coordinator.attention_groups = [each._replace(use_eagle=False) for each in coordinator.attention_groups]
    for manager in coordinator.single_type_managers:
        manager.use_eagle = False
