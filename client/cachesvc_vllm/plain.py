"""Parts of the connector that need no vLLM: lengths, drafters' keys, pace of steps, ranks, logs."""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cachesvc_client.plugins.keeper import ConnectorRefused
from cachesvc_client.plugins.request_pages import RequestPages

from cachesvc.model.words import KEY_BYTES
from cachesvc_vllm.vllm_objects import HashedRequest, Request, VllmConfig


def computed_blocks(
    *, computed_tokens: int, in_flight_tokens: int, block_tokens: int, keys: int, redrafted_tokens: int = 0
) -> int:
    """Return how many leading blocks of a request may be sealed, at most one for each of its ``keys``.

    vLLM counts tokens as computed that steps under way still write, and a drafter of several modules writes its KV of
    the last ``redrafted_tokens`` of them again.
    """
    return min(max(0, computed_tokens - in_flight_tokens - redrafted_tokens) // block_tokens, keys)


def fills_nothing(request: Any, pages: RequestPages, new_tokens: int, lookahead_tokens: int, block_tokens: int) -> bool:
    """Return True where ``KVCacheManager.allocate_slots`` would do nothing for a request that runs: it has a slot for
    each token, and vLLM has reported the blocks that are full. That is most of what decoding costs there, in most
    iterations. False for requests with windows or states, which are freed there."""
    if new_tokens <= 0 or not pages.taken or pages.others or pages.tail is not None:
        return False
    tokens = request.num_computed_tokens + new_tokens
    has_slots = tokens + lookahead_tokens <= pages.taken_blocks * block_tokens
    return bool(has_slots and tokens < (pages.full_blocks + 1) * block_tokens)


def blocks_wanted(
    request: Any,
    new_tokens: int,
    *,
    external_tokens: int,
    lookahead_tokens: int = 0,
    longest_tokens: int,
    block_tokens: int,
    step_tokens: int | None = None,
) -> int:
    """Return how long a request's table has to be for ``new_tokens`` behind what is computed, ``external_tokens`` that
    are loaded and ``lookahead_tokens`` of a drafter; no longer than ``longest_tokens``. ``step_tokens``: the most that
    is computed in a step, where pages come back between two of them; None where none does."""
    tokens = new_tokens + external_tokens + lookahead_tokens
    if external_tokens:  # it holds them while it waits, so it gets all that it needs to run
        rest = request.num_tokens - tokens
        rest = rest if step_tokens is None else min(rest, step_tokens)
        tokens += max(0, rest + max(block_tokens, lookahead_tokens))
    tokens = min(int(request.num_computed_tokens) + tokens, longest_tokens)
    return -(-tokens // block_tokens)


# Block keys of engines with a drafter: they cover the tokens behind a block that its drafter's KV depends on.
#
# EAGLE-like drafters compute their KV at a position from the target's hidden state there and from the next token. So
# the last position of a block is right for one continuation only. vLLM drops the last block of each hit for that
# reason, or, since 0.33 and without a connector, hashes the next tokens too. Here the connector does the latter:
#
#     key of block i = H(vLLM's hash of block i, the next L tokens)      L: tokens that the drafter reads ahead
#
# A block is sealed once these tokens are known and verified, and no block of a hit is dropped. Keys stay prefix-closed:
# the hash of block i + 1 covers the tokens that the key of block i looks ahead to, as long as L is at most a block.

PERSON = b"kv-lookahead"


ExtraKeys = Callable[[Any, int, int], object]
"""``extra_keys(request, first, end)``: what vLLM hashes of these tokens beside their ids (images, embeddings)."""


def draft_lookahead(vllm_config: VllmConfig) -> int:
    """Return how many tokens behind a position its drafter's KV depends on; 0 without such a drafter."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle():
        return 0
    return int(vllm_config.num_prefill_lookahead_tokens)


def has_late_kernels(vllm_config: VllmConfig) -> bool:
    """Return True where kernels may run on when a step's output has come: those of a drafter with KV of its own, and
    with recurrent states the copy of what was accepted, which vLLM's V2 runner launches behind the output's."""
    speculative = vllm_config.speculative_config
    has_states = bool(getattr(vllm_config.model_config, "is_hybrid", False))
    return speculative is not None and (bool(speculative.uses_draft_kv_cache()) or has_states)


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


# Log lines of the connector in vLLM's form, with time and process: Python prints those of a logger without handlers
# bare.

OURS = ("cachesvc_client", "cachesvc_vllm")


def log_as_vllm() -> None:
    """Give the connector's loggers vLLM's handlers, unless the program has set handlers for them. Idempotent."""
    theirs = logging.getLogger("vllm").handlers
    for logger in map(logging.getLogger, OURS):
        if theirs and not logger.hasHandlers():
            logger.handlers = list(theirs)
            logger.propagate = False


@dataclass(frozen=True, slots=True)
class Start:
    """Start of one rank: it has its slab of ``model``, which is empty where no daemon is there and none is required; or
    a ``failure`` kept it from starting. ``replaced``: why its name may be of other weights than it has."""

    model: str = ""
    failure: str = ""
    replaced: str = ""


def agreed_model(starts: Sequence[Start]) -> str:
    """The model that every rank has its slab of; empty where one rank has none, and the others may not use theirs.
    Raises ConnectorRefused where a rank failed, or ranks share as different models."""
    for rank, start in enumerate(starts):
        if start.failure:
            raise ConnectorRefused(f"rank {rank} did not start: {start.failure}")
    models = {start.model for start in starts}
    if "" in models:
        return ""
    if len(models) > 1:
        raise ConnectorRefused(f"ranks of one engine share as {', '.join(sorted(models))}: they read different weights")
    return models.pop()


class WarmUp:
    """Guard from ``begin`` to ``end``; does nothing where this vLLM has no runner that warms up so."""

    def __init__(self) -> None:
        self._tables: Any = None

    def begin(self) -> None:
        """Replace every block id that a runner gets by page 0 from now on."""
        try:
            from vllm.v1.worker.gpu.block_table import BlockTables
        except ImportError:  # no Triton: the runner that warms up so cannot be here
            return
        self._tables = BlockTables
        BlockTables.redirect_writes_to_null_block = True

    def end(self) -> None:
        """Block ids are what they are. Idempotent."""
        tables, self._tables = self._tables, None
        if tables is not None:
            tables.redirect_writes_to_null_block = False


# Reports put off until the first token of a lone request has come: its client waits for nothing else.
#
# Under asynchronous scheduling the next iteration is scheduled before the output of the last one is taken:
#
#     step 0   admits the request          no report
#     step 1                               no report
#     output of step 0: the first token    no report; it goes to the client
#     step 2                               reports what has gathered

MOST_STEPS = 2
"""Iterations whose reports may be put off: other engines wait for what they free."""


class FirstToken:
    def __init__(self) -> None:
        self._is_awaited = False
        self._steps = 0

    def admit(self, *, is_alone: bool) -> None:
        """Note that a request was admitted; ``is_alone``: no other one is unfinished."""
        self._is_awaited = is_alone
        self._steps = MOST_STEPS

    def may_report(self) -> bool:
        """Return whether the iteration that was scheduled reports."""
        if self._is_awaited:
            self._steps -= 1
        return not self._is_awaited or self._steps < 0

    def take_output(self) -> bool:
        """Note that an output has come; return whether it is the first behind an admission, which nothing holds up."""
        is_first, self._is_awaited = self._is_awaited, False
        return is_first


# Pace of reports: those of decoding requests are sent together, once in four iterations.
#
# In most iterations of a decoding batch some requests fill a block and take the next one from the stock. A message
# costs more than its content, and the daemon may get this content later: a stock page is the engine's anyway, and the
# block of an answer is matched with the next turn. Matches, blocks of prompts, returned pages and a low stock are sent
# at once (``PageBook.is_urgent``).

MOST_GATHERED = 4
"""Iterations whose reports go together: 40 ms at 10 ms each."""


class Pace:
    def __init__(self) -> None:
        self._gathered = 0

    def is_due(self, *, is_urgent: bool) -> bool:
        """Return whether the iteration that was scheduled reports. ``is_urgent``: it has more to tell than usual."""
        self._gathered += 1
        if not is_urgent and self._gathered < MOST_GATHERED:
            return False
        self._gathered = 0
        return True
