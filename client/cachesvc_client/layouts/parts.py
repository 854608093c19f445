"""Groups with smaller blocks than their layout's: a group for each part of a block, over one pool.

A layout has one size of blocks, that of its keys: hits end at those. A group whose pages hold fewer tokens has several
in each block, and they are groups of their own:

    layout     |      block 0      |      block 1      |
    window-p0  |  page 0           |  page 2           |
    window-p1  |           page 1  |           page 3  |

The page of an earlier part falls out of a window sooner, so its group has a shorter one. Where a window does not reach
it from the end of its block, no hit needs it: its group is scratch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice

import numpy as np

from cachesvc.model.errors import LayoutRejected
from cachesvc.model.layout import Plane, PlaneGroup
from cachesvc_client.records.tables import Pages


@dataclass(frozen=True, slots=True)
class Parts:
    """One group of an engine as groups of a layout. ``groups``: their indices, in the order of the parts of a block.
    ``count``: pages of a block."""

    groups: tuple[int, ...]
    count: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", len(self.groups))

    def pages(self, tables: Sequence[Pages], first: int, end: int | None = None) -> list[int]:
        """Return the pages ``[first, end)`` of the engine's own table; up to its end without ``end``."""
        if self.count == 1:
            alone: list[int] = tables[self.groups[0]][first:end].tolist()
            return alone
        row = first // self.count
        end_row = None if end is None else -(-end // self.count)
        rows = [tables[group][row:end_row] for group in self.groups]
        last = None if end is None else end - row * self.count
        cells: list[int] = np.stack(rows, axis=1).ravel()[first - row * self.count : last].tolist()
        return cells

    def groups_at(self, first: int) -> Iterator[int]:
        """Return the groups of the pages from ``first`` on, without end."""
        return islice(cycle(self.groups), first % self.count, None)

    def dead(self, first: int) -> dict[int, int]:
        """Return by group the first block that is needed still, where ``first`` is the first such page of the engine's
        table: what ``Sequence.give_back`` takes."""
        return {group: -(-max(0, first - part) // self.count) for part, group in enumerate(self.groups)}

    def dead_pages(self, dead: Mapping[int, int]) -> int:
        """Return the first page that is needed still, of what ``dead`` returned."""
        return sum(dead.get(group, 0) for group in self.groups)


def part_group(
    group: PlaneGroup, planes: Sequence[Plane], *, block_tokens: int, part_tokens: int
) -> tuple[list[PlaneGroup], list[Plane]]:
    """Return the groups and planes of a group with blocks of ``part_tokens`` in a layout of ``block_tokens``.

    ``planes``: those of one page. Raises LayoutRejected where the sizes do not fit, for states within a block, and
    without a pool that the parts share.
    """
    if part_tokens < 1 or block_tokens % part_tokens:
        raise LayoutRejected(
            f"group {group.name!r} has blocks of {part_tokens} tokens, which is no divisor of the layout's "
            f"{block_tokens}: take the least common multiple of all groups' for the layout"
        )
    count = block_tokens // part_tokens
    if count == 1:
        return [group], list(planes)
    if group.is_state:
        raise LayoutRejected(
            f"group {group.name!r} has states each {part_tokens} tokens, and blocks of the layout have {block_tokens}: "
            "a state is valid at the end of a block alone; make them equal"
        )
    if not group.pool:
        raise LayoutRejected(f"group {group.name!r} has {count} pages a block and no pool: name one that they share")
    groups = [_part(group, part, count, part_tokens) for part in range(count)]
    return groups, [replace(plane, group=each.name) for each in groups for plane in planes]


def _part(group: PlaneGroup, part: int, count: int, part_tokens: int) -> PlaneGroup:
    """The pages of a part, which lie in their blocks as if they were the whole of them: so the window's last token is
    nearer, and so are the sinks."""
    window, sinks = group.window_tokens, max(0, group.sink_tokens - part * part_tokens)
    if window is not None:
        window = max(1 if sinks else 0, window - (count - 1 - part) * part_tokens)
    return replace(group, name=f"{group.name}-p{part}", window_tokens=window, sink_tokens=sinks)
