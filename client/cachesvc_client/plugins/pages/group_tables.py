"""Tables of a request's groups beside the leading one: pages by position, with holes.

The leading group keeps whole sequences, and its table is as long as the request (``RequestPages``). The others have
cells at the same positions: all of them (whole sequences too), those from a window's beginning on, or one at the end of
each scheduled chunk (states). The engine takes a cell once, in order, and frees the first ones again; what lies below
the first cell that it may still read goes back to the daemon.

The daemon's blocks have the tokens in which each group has whole blocks. A group with smaller ones has several cells
for each, which are groups of their own there (``Parts``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from cachesvc.model.layout import Layout
from cachesvc.model.words import NO_PAGE
from cachesvc_client.layouts.parts import Parts
from cachesvc_client.records.tables import Pages

Positions = Mapping[int, Sequence[int]]
"""By state group, where the engine takes a page next."""

NO_POSITIONS: Positions = MappingProxyType({})

AllParts = tuple[Parts, ...]
"""Groups of a layout that each of an engine's is."""


class Growth(NamedTuple):
    """Length of a request's tables, and by state group the new blocks that get a page."""

    blocks: int
    positions: Mapping[int, list[int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class EngineGroups:
    """An engine's groups in a layout: ``parts`` of each, those of ``states``, and the leading one, ``lead``."""

    parts: AllParts
    states: frozenset[int]
    lead: int

    @property
    def lead_parts(self) -> Parts:
        """Groups of the leading one."""
        return self.parts[self.lead]

    @property
    def row_pages(self) -> int:
        """Number of pages that a further block takes, without states."""
        return sum(each.count for group, each in enumerate(self.parts) if group not in self.states)

    def state_of(self, group: int) -> int:
        """The layout's group of states that one of the engine's is."""
        return self.parts[group].groups[0]

    def other_tables(self) -> list[GroupTable]:
        """Empty tables of the groups beside the leading one."""
        return [GroupTable(each, group in self.states) for group, each in enumerate(self.parts) if group != self.lead]


def engine_groups(layout: Layout, parts: AllParts = ()) -> EngineGroups:
    """Return an engine's groups. Without ``parts`` each of the layout's is one."""
    each_alone = [Parts((group,)) for group in range(len(layout.own_groups)) if group != layout.marker]
    mine = parts or tuple(each_alone)
    first = [layout.groups[each.groups[0]] for each in mine]
    states = frozenset(group for group, each in enumerate(first) if each.is_state)
    return EngineGroups(mine, states, next(group for group, each in enumerate(first) if each.is_full))


@dataclass(slots=True, eq=False)
class GroupTable:
    """``parts``: its groups in the layout. ``pages``: by position, NO_PAGE in a hole. The engine has taken cells up to
    ``taken``, has not freed ``held`` of them, and needs none below ``first``, which was noted up to ``told`` and
    reported up to ``given_back``. Of a state group: ``unused``: positions whose own pages the engine has not taken;
    ``states``: pages that it has taken, by position, until they are sealed, freed or not."""

    parts: Parts
    is_state: bool
    pages: list[int] = field(default_factory=list)
    taken: int = 0
    held: int = 0
    first: int = 0
    told: int = 0
    given_back: int = 0
    unused: list[int] = field(default_factory=list)
    states: dict[int, int] = field(default_factory=dict)

    @property
    def state_group(self) -> int:
        """The layout's group of these states."""
        return self.parts.groups[0]

    @property
    def spare(self) -> int:
        """Number of pages that the engine has not taken."""
        rest = self.pages[self.taken :]
        return len(rest) - rest.count(NO_PAGE)

    def page_at(self, position: int) -> int:
        """The page at a position; NO_PAGE where there is none."""
        return self.pages[position] if position < len(self.pages) else NO_PAGE

    def lacking(self, positions: Iterable[int], loaded_blocks: int) -> list[int]:
        """Those of the ``positions`` of states that have no page. A page of a later position will do: states are sealed
        where they are computed. Those of ``loaded_blocks`` blocks come with a load."""
        unused, found = list(self.unused), []
        for position in positions:
            if position < loaded_blocks:
                continue
            later = next((each for each in unused if each >= position), None)
            if later is None:
                found.append(position)
            else:
                unused.remove(later)
        return found

    def read(self, tables: Sequence[Pages], loaded_blocks: int) -> None:
        """Add the cells behind the last one, from the tables of all of the layout's groups. Others stay: kernels have
        the table."""
        first = len(self.pages)
        self.pages += self.parts.pages(tables, first)
        self._note_unused(first, loaded_blocks)

    def add(self, pages: Iterable[int]) -> None:
        """Add cells with own pages."""
        first = len(self.pages)
        self.pages += pages
        self._note_unused(first, first)

    def _note_unused(self, first: int, loaded_blocks: int) -> None:
        if self.is_state:
            new = range(max(first, loaded_blocks), len(self.pages))
            self.unused += [position for position in new if self.pages[position] != NO_PAGE]

    def hold(self, position: int, cells: int) -> None:
        """The engine uses cells from ``position`` on."""
        if not self.held:
            self.first = position
        self.held += cells
        self.taken = max(self.taken, position + cells)

    def take(self, first: int, cells: int) -> list[int]:
        """The pages of new cells, which were reserved."""
        if self.is_state:
            for position in range(first, first + cells):
                self._move_here(position)
        pages = self.pages[first : first + cells]
        assert len(pages) == cells
        assert NO_PAGE not in pages
        self.hold(first, cells)
        return pages

    def _move_here(self, position: int) -> None:
        """Use an own page of this or a later position, unless one was loaded here."""
        later = next((each for each in self.unused if each >= position), None)
        if later is None or (later > position and self.page_at(position) != NO_PAGE):
            return
        self.unused.remove(later)
        page, self.pages[later] = self.pages[later], NO_PAGE
        self.pages[position] = self.states[position] = page

    def free(self, position: int) -> None:
        """The engine has freed a cell, and needs none before it. A state there may be sealed all the same: an engine
        frees what it needs no more while the output of the step that wrote it is on its way."""
        self.held -= 1
        self.first = max(self.first, position + 1)

    @property
    def unread(self) -> int:
        """Number of leading cells that the engine has freed and whose states are sealed: no step needs them."""
        return min((self.first, *self.states))

    def take_states(self, blocks: int) -> dict[int, int]:
        """States below ``blocks``, which are computed: they are to be sealed."""
        ready = {position: page for position, page in self.states.items() if position < blocks}
        for position in ready:
            del self.states[position]
        return ready

    def take_replaced(self, tables: Sequence[Pages], dead: Mapping[int, int]) -> list[tuple[int, int]]:
        """Pages ``(group, page)`` of cells that are dead and for which another engine's were sealed: the kernels had
        this request's own until now. A state's page stays where it was granted, and goes with that cell."""
        first, end = self.given_back, min(self.parts.dead_pages(dead), len(self.pages))
        if self.is_state or end <= first:
            return []
        self.given_back = end
        cells = self.parts.pages(tables, first, end)
        mine = zip(self.parts.groups_at(first), self.pages[first:end], cells, strict=False)
        return [(group, page) for group, page, cell in mine if NO_PAGE != page != cell]

    def drop_pages(self, first: int, end: int) -> list[int]:
        """Take the pages of cells out of the table."""
        end = min(end, len(self.pages))
        dropped = [page for page in self.pages[first:end] if page != NO_PAGE]
        self.pages[first:end] = [NO_PAGE] * max(0, end - first)
        return dropped
