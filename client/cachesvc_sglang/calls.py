"""Calls of SGLang to the caches of an engine's ranks: what must be alike in all of them, and what rank 0 answers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import StrEnum, auto
from typing import Any, NamedTuple

from cachesvc_sglang.engine_cache import name_of
from cachesvc_sglang.host_loads import LoadBegin
from cachesvc_sglang.links import Call
from cachesvc_sglang.plain import PromptKeys

LEASE = "lease"
"""Word of a follower on the lease that it is on."""


class Called(StrEnum):
    START = auto()
    ITERATION = auto()
    MOVE = auto()
    MATCH = auto()
    LOAD = auto()
    ROOM = auto()
    PROMPT = auto()
    DECODE = auto()
    TAKE = auto()
    STEP = auto()
    LAUNCHED = auto()


class MatchAnswer(NamedTuple):
    """A hit. ``is_new``: of pages that the request did not have before; ``is_used``: what the host has of it is, or
    comes layer by layer."""

    is_new: bool
    hit_blocks: int
    host_blocks: int
    is_used: bool


class LoadAnswer(NamedTuple):
    """``load``: to look at, where it runs. ``is_used``: as of ``MatchAnswer``. ``is_given``: SGLang computes on it."""

    load: LoadBegin | None
    is_used: bool
    is_given: bool


def prompt_call(name: str, key: Any, keys: PromptKeys | None, block_tokens: int) -> Call:
    """Match of the request ``name``. The key of its last whole block stands for all tokens; without keys, their number
    does."""
    blocks = 0 if keys is None else min(len(key.token_ids) // block_tokens, len(keys.hashes))
    last = keys.hashes[blocks - 1].hex() if keys is not None and blocks else ""
    return (Called.MATCH, name, len(key.token_ids), key.limit, last)


def requests_call(called: Called, requests: Sequence[Any], tokens: int) -> Call:
    """Call for a batch, in its order, of ``tokens`` tokens."""
    return (called, len(requests), tokens, zlib.crc32("\n".join(map(name_of, requests)).encode()))
