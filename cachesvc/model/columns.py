"""Operations of many sequences in one iteration, entry by entry: the columns of a Step as flows read them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

MAX_OPERATIONS = 4096
"""Most operations of a Step; a daemon may be configured for fewer."""

Positions = Mapping[int, Sequence[int]]
"""New blocks that get a page, by windowed group: their positions, rising."""
NO_POSITIONS: Positions = MappingProxyType({})


class Growth(NamedTuple):
    """Entry ``n`` is sequence ``sequences[n]``, which takes the stock pages ``pages[g][starts[n]:starts[n + 1]]`` of
    each group ``g``, with their ``generations[g]``. All groups have ``starts[-1]`` pages."""

    sequences: Sequence[int]
    starts: Sequence[int]
    pages: Sequence[Sequence[int]]
    generations: Sequence[Sequence[int]]


class Publishes(NamedTuple):
    """Entry ``n`` is sequence ``sequences[n]``, which has ``first[n]`` sealed blocks and seals ``starts[n + 1] -
    starts[n]`` more. ``keys``: of all blocks in order, packed; empty: all are known from Match."""

    sequences: Sequence[int]
    first: Sequence[int]
    starts: Sequence[int]
    keys: bytes


class Releases(NamedTuple):
    """Entry ``n`` is sequence ``sequences[n]``, whose request has put out ``output_tokens[n]`` tokens (None: its engine
    does not say); no ``output_tokens`` at all: none does."""

    sequences: Sequence[int]
    output_tokens: Sequence[int | None]


def before_repeated(numbers: Sequence[int], held: Collection[int]) -> Sequence[int]:
    """The first of ``numbers``, up to one that is among ``held`` or was named before."""
    if not held and len(set(numbers)) == len(numbers):
        return numbers
    seen = set(held)
    for at, number in enumerate(numbers):
        if number in seen:
            return numbers[:at]
        seen.add(number)
    return numbers
