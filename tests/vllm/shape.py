"""Settings with which an engine of ``scheduling`` is started."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cachesvc_client.layouts.families import Parts, part_group
from cachesvc_vllm.cache_groups import GROUP, POOL

from cachesvc.model.layout import Layout, Plane, PlaneGroup

BLOCK_TOKENS = 4
DIGEST_BYTES = 8
"""Digest of a token: the content of a slot."""


@dataclass(frozen=True)
class Group:
    """A group of the cache; with neither window nor states, it keeps whole sequences. ``saves_within``: the last chunk
    of a prompt leaves a state at the end of its last whole block too."""

    window_tokens: int | None = None
    is_state: bool = False
    saves_within: bool = False
    block_tokens: int = BLOCK_TOKENS


FULL, WINDOW, STATE = Group(), Group(window_tokens=10), Group(is_state=True)
WIDE_FULL, WIDE_WINDOW = Group(block_tokens=8), Group(window_tokens=18, block_tokens=8)
"""Groups of blocks with twice as many tokens."""
SAVED_STATE = Group(is_state=True, saves_within=True)


@dataclass(frozen=True)
class Shape:
    """Settings of an engine. ``draft_blocks``: the connector's setting, of engines with a drafter; empty: they guess
    by n-grams. ``keeps_last``: vLLM itself leaves out no block of a hit. ``drafts_late``: its kernels run once the
    step's output was taken, before those of the next step. ``page_bytes``: more than digests need, so that loads take
    their time. ``recomputes``: what was not loaded; else its request ends with an error. ``events``: the folder of
    sockets on which vLLM publishes KV events, one for each engine; empty: it publishes none. ``groups``: of the cache,
    over one pool; the last one keeps whole sequences. ``has_priorities``: requests have some, and vLLM schedules by
    them. ``stages``: of a pipeline. ``patience_ms``: with what another node is said to compute."""

    pages: int = 96
    at_a_time: int = 8
    step_tokens: int = 64
    stock: int = 4
    drafts: int = 0
    draft_blocks: str = ""
    keeps_last: bool = False
    weights_version: str = ""
    drafts_late: bool = False
    is_async: bool = False
    stages: int = 1
    page_bytes: int = 2 * BLOCK_TOKENS * DIGEST_BYTES
    recomputes: bool = True
    events: str = ""
    has_priorities: bool = False
    patience_ms: int = 10_000
    groups: tuple[Group, ...] = (FULL,)

    @property
    def steps_under_way(self) -> int:
        """Most steps that vLLM schedules before it takes the output of the first of them."""
        return self.stages + self.is_async

    @property
    def block_tokens(self) -> int:
        """Tokens of a block in which each group has whole ones."""
        return math.lcm(*(each.block_tokens for each in self.groups))

    @property
    def hash_tokens(self) -> int:
        """Tokens of vLLM's hashes."""
        return math.gcd(*(each.block_tokens for each in self.groups))

    @property
    def layout(self) -> Layout:
        """Layout that its engine registers."""
        if self.groups == (FULL,):
            return Layout(
                self.block_tokens, 1, (PlaneGroup(GROUP),), (Plane("kv", 0, GROUP, (self.page_bytes,), "uint8"),)
            )
        groups, planes = [], []
        for index, each in enumerate(self.groups):
            group = PlaneGroup(f"g{index}", window_tokens=each.window_tokens, is_state=each.is_state, pool=POOL)
            mine = [Plane("kv", 0, group.name, (self.page_bytes,), "uint8")]
            more = part_group(group, mine, block_tokens=self.block_tokens, part_tokens=each.block_tokens)
            groups += more[0]
            planes += more[1]
        return Layout(self.block_tokens, 1, tuple(groups), tuple(planes))

    @property
    def parts(self) -> tuple[Parts, ...]:
        """Groups of the layout that each of its own is."""
        first, found = 0, []
        for each in self.groups:
            count = self.block_tokens // each.block_tokens
            found.append(Parts(tuple(range(first, first + count))))
            first += count
        return tuple(found)
