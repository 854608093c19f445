"""Publish states: pages that hold a recurrent layer's state at the end of a block, sealed at their engine's word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cachesvc.flows.context.call import Call
from cachesvc.flows.context.core import Core
from cachesvc.flows.transfer.late_states import back_up_copies
from cachesvc.ledger.block_tables import BlockTables
from cachesvc.ledger.index.tier_copies import NO_ROW
from cachesvc.ledger.sequences import OpenSequence
from cachesvc.model.answers import GroupCells
from cachesvc.model.errors import InvalidRequest, NotOwned
from cachesvc.model.words import NO_PAGE


class NamedState(NamedTuple):
    """A page of a sequence that is to be published as the state at a position."""

    group: int
    position: int
    page: int


@dataclass(slots=True)
class NamedStates:
    """States of one publish. ``left``: those whose block is not sealed yet; ``refused``: those that are there."""

    left: list[NamedState]
    refused: list[NamedState] = field(default_factory=list)

    def kept(self) -> tuple[GroupCells, ...]:
        """States that were not sealed: their pages are the sequence's own still."""
        return tuple(GroupCells(group, position, (page,)) for group, position, page in (*self.refused, *self.left))


def named_states(call: Call, sequence: OpenSequence, cells: Sequence[GroupCells], blocks: int) -> NamedStates:
    """The states that ``cells`` name, of a sequence that will have ``blocks`` sealed blocks. Raises InvalidRequest (no
    group of states, a position behind those blocks, a page named twice), NotOwned (a page that is not its own)."""
    found: list[NamedState] = []
    for group, first, pages, _ in cells:
        if group not in call.model.layout.state_groups:
            raise InvalidRequest(f"group {group} has no states; its blocks are published with their keys")
        found += [NamedState(group, first + at, page) for at, page in enumerate(pages) if page != NO_PAGE]
    for group, position, page in found:
        if position >= blocks:
            raise InvalidRequest(f"a state at block {position} needs that block published; there are {blocks}")
        if page not in sequence.own[group]:
            raise NotOwned(f"page {page} of group {group} is not sequence {sequence.id}'s own")
        if sequence.pages_ahead and page not in sequence.tables[group]:
            raise NotOwned(f"page {page} of group {group} is in no table of sequence {sequence.id} yet")
    if len({(group, page) for group, _, page in found}) < len(found):
        raise InvalidRequest("a page is named as two states; name each once")
    return NamedStates(found)


def seal_states(core: Core, call: Call, tables: BlockTables, named: NamedStates) -> None:
    """Seal the states whose blocks are sealed by now. Those of blocks that the host has, or is getting, follow there;
    the others go with their blocks."""
    sealed: list[tuple[int, int]] = []
    ready = [state for state in named.left if state.position < tables.sealed]
    named.left = [state for state in named.left if state.position >= tables.sealed]
    for state in ready:
        row = tables.seal_state(*state) if state.page in tables.own[state.group] else NO_ROW
        if row == NO_ROW:
            named.refused.append(state)
        else:
            sealed.append((state.group, row))
    if sealed and core.writing.copies_when_sealed:
        back_up_copies(core, call.model, call.replica, sealed)
