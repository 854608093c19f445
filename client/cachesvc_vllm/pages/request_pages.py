"""The pages of one request, from its match to the last of them that vLLM frees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cachesvc_client import Sequence as DaemonSequence


def computed_blocks(
    *, computed_tokens: int, in_flight_tokens: int, block_tokens: int, keys: int, redrafted_tokens: int = 0
) -> int:
    """Return how many leading blocks of a request may be sealed, at most one for each of its ``keys``.

    vLLM counts tokens as computed that steps under way still write, and a drafter of several modules writes its KV of
    the last ``redrafted_tokens`` of them again.
    """
    return min(max(0, computed_tokens - in_flight_tokens - redrafted_tokens) // block_tokens, keys)


def blocks_wanted(
    request: Any,
    new_tokens: int,
    *,
    external_tokens: int,
    lookahead_tokens: int,
    longest_tokens: int,
    block_tokens: int,
) -> int:
    """Return how long a request's table has to be for ``new_tokens`` behind what is computed, ``external_tokens`` that
    are loaded and ``lookahead_tokens`` of a drafter; no longer than ``longest_tokens``."""
    tokens = new_tokens + external_tokens + lookahead_tokens
    if external_tokens:  # it holds them while it waits, so it gets all that it needs to run
        tokens = max(tokens, request.num_tokens + max(block_tokens, lookahead_tokens))
    tokens = min(int(request.num_computed_tokens) + tokens, longest_tokens)
    return -(-tokens // block_tokens)


@dataclass(frozen=True, slots=True)
class Wish:
    """Match of a request: at most ``most_blocks`` blocks of ``hashes``. ``first_blocks``: as many as vLLM takes first,
    hits included. ``salt``: what the hashes are mixed with (``Adapters.salt``)."""

    hashes: Sequence[bytes]
    most_blocks: int
    first_blocks: int
    salt: bytes = b""


@dataclass(slots=True, eq=False)
class RequestPages:
    """``sequence``: None where there was no daemon to match it: all pages are private then.

    ``pages``: the request's table, which only grows. A page keeps its place when another engine was faster to publish
    its block, because kernels have the table. ``hit_blocks`` of them were found in place, ``host_blocks`` behind these
    have to be loaded. vLLM has taken the first ``taken`` pages and not freed ``held`` of them. ``wanted``: up to where
    blocks are computed and to be sealed; vLLM has said of the first ``full_blocks`` that they are full, or will be once
    what is scheduled is computed. ``first_blocks``: as many as vLLM takes first, if it has room. ``is_shortened``: the
    last block of its hit was left out already. ``is_loading``: its loads were handed to workers. ``is_foreign``:
    another connector loads a part of it, which the daemon cannot vouch for: it is not shared. ``is_matching``: its
    match has no answer yet; ``is_forgotten``: and the request ended meanwhile. ``salt``: as the wish had it.
    """

    request_id: str
    begun_s: float
    sequence: DaemonSequence | None = None
    pages: list[int] = field(default_factory=list)
    hit_blocks: int = 0
    host_blocks: int = 0
    taken: int = 0
    held: int = 0
    wanted: int = 0
    full_blocks: int = 0
    output_tokens: int = 0
    first_blocks: int = 0
    is_shortened: bool = False
    is_loading: bool = False
    is_foreign: bool = False
    is_matching: bool = False
    is_forgotten: bool = False
    salt: bytes = b""

    @property
    def is_ahead(self) -> bool:
        """True while vLLM has taken nothing of it."""
        return not self.held and not self.taken

    @property
    def is_shared(self) -> bool:
        """True where others may get what it computes."""
        return self.sequence is not None and not self.is_foreign

    @property
    def wants_pages(self) -> bool:
        """True while it was matched, waits, and was given no pages yet."""
        if not self.is_ahead or not self.is_usable or self.sequence is None:
            return False
        return len(self.pages) <= self.hit_blocks < self.first_blocks and not self.is_growing

    @property
    def is_growing(self) -> bool:
        """True while it was asked for pages, and there is no answer."""
        return self.sequence is not None and self.sequence.record.allocations > 0

    @property
    def is_usable(self) -> bool:
        """True while the daemon has the sequence and can load its blocks."""
        if self.sequence is None:
            return False
        return self.sequence.record.failure is None and not self.sequence.record.has_failed_load

    def match(self, sequence: DaemonSequence) -> None:
        """Begin with a hit."""
        self.sequence = sequence
        self.hit_blocks, self.host_blocks = sequence.device_blocks, sequence.host_blocks
        self.take_cells()

    def take_cells(self) -> None:
        """Add the pages that came since."""
        assert self.sequence is not None
        if self.sequence.blocks > len(self.pages):
            self.pages += self.sequence.tables[0][len(self.pages) :].tolist()

    def take_hits(self) -> None:
        """vLLM uses all of the hit that is in place."""
        assert self.taken == 0
        self.taken = self.full_blocks = self.hit_blocks
        self.held += self.hit_blocks

    def take(self, blocks: int) -> list[int]:
        """The next pages, which were reserved. Never a page of the hit: others read it."""
        assert self.taken >= self.hit_blocks
        assert self.taken + blocks <= len(self.pages)
        first = self.taken
        self.taken += blocks
        self.held += blocks
        return self.pages[first : self.taken]

    def private_pages(self) -> list[int]:
        """Pages that only this request ever wrote, and that were never published."""
        return self.pages[max(self.wanted, self.hit_blocks + self.host_blocks) :]
