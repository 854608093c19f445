"""Class of a request, by what it shows of how soon its blocks will be used again: a tuple of small numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

NEW_TOKENS = (1024, 4096, 12288, 32768)
LINE_GAPS = (15, 60, 240)
HUB_GAPS = (4, 15, 60, 240)
OUTPUT_TOKENS = (80, 200, 400, 800)
NO_GAP = 0
FIRST_HUB_GAP = len(LINE_GAPS) + 2
KNOWN_MOST = 2


class Features(NamedTuple):
    """``new_tokens``: class of the tokens that were computed. ``gap``: of the smoothed seconds between a line's turns,
    or between uses of a known beginning, or ``NO_GAP``. ``known``: of the known blocks of a new line."""

    new_tokens: int
    gap: int
    known: int


def features(new_tokens: int, line_gap: float | None, hub_gap: float | None, known_blocks: int) -> Features:
    """``line_gap`` (seconds): of the line that the request goes on with; None: it begins one, at ``hub_gap``."""
    fresh = bisect_right(NEW_TOKENS, new_tokens)
    if line_gap is not None:
        return Features(fresh, 1 + bisect_right(LINE_GAPS, line_gap), 0)
    gap = NO_GAP if hub_gap is None else FIRST_HUB_GAP + bisect_right(HUB_GAPS, hub_gap)
    return Features(fresh, gap, min(known_blocks, KNOWN_MOST))


def output_class(tokens: int) -> int:
    """Class of a request's output."""
    return bisect_right(OUTPUT_TOKENS, tokens)


class Classes:
    """Numbers of classes, as they are first seen; ``add_row(table, group)`` gives the next one, of that group."""

    def __init__(self, add_row: Callable[[int, tuple[int, ...]], int]) -> None:
        self._add_row = add_row
        self._rows: dict[tuple[int, bool, Features, int | None], int] = {}
        self._names: list[tuple[Features, int | None, bool]] = []

    def row(self, table: int, seen: Features, output: int | None, *, is_shared: bool) -> int:
        """The number of a class, which is that of its queue. ``output``: class of the output, once it is known."""
        name = (table, is_shared, seen, output)
        row = self._rows.get(name)
        if row is None:
            group = (int(is_shared), seen.new_tokens, -1 if output is None else output)
            row = self._rows[name] = self._add_row(table, group)
            self._names.append((seen, output, is_shared))
        return row

    def in_words(self, row: int) -> str:
        """Meaning of a class."""
        seen, output, is_shared = self._names[row]
        return in_words(seen, output, is_shared=is_shared)


def in_words(seen: Features, output: int | None, *, is_shared: bool) -> str:
    """Meaning of a class, as an operator reads it."""
    parts = ["beginning that others share" if is_shared else "end of its own"]
    parts.append(_between("computed tokens", NEW_TOKENS, seen.new_tokens))
    if seen.gap == NO_GAP:
        parts.append("first of its kind")
    elif seen.gap < FIRST_HUB_GAP:
        parts.append(f"a line with {_between('seconds between turns', LINE_GAPS, seen.gap - 1)}")
    else:
        gap = _between("seconds between uses of its beginning", HUB_GAPS, seen.gap - FIRST_HUB_GAP)
        parts.append(f"a new line with {gap}")
    if output is not None:
        parts.append(_between("output tokens", OUTPUT_TOKENS, output))
    return ", ".join(parts)


def _between(what: str, borders: tuple[int, ...], number: int) -> str:
    if number == len(borders):
        return f"{what} from {borders[-1]} up"
    return f"{what} below {borders[number]}"
