"""Publish states: pages that hold a recurrent layer's state at the end of a block, sealed at their engine's word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cachesvc.flows.context.call import Call
from cachesvc.ledger.sequences import Sequence as OpenSequence
from cachesvc.model.answers import GroupCells
from cachesvc.model.errors import InvalidRequest, NotOwned
from cachesvc.model.words import NO_PAGE


class NamedState(NamedTuple):
    """A page of a sequence that is to be published as the state at a position."""

    group: int
    position: int
    page: int


def named_states(call: Call, sequence: OpenSequence, cells: Sequence[GroupCells], blocks: int) -> list[NamedState]:
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
    if len({(group, page) for group, _, page in found}) < len(found):
        raise InvalidRequest("a page is named as two states; name each once")
    return found


def seal_states(sequence: OpenSequence, named: Sequence[NamedState]) -> tuple[GroupCells, ...]:
    """Seal each of the states whose block is sealed and that is not there yet. Returns the others: their pages stay the
    sequence's own."""
    kept = [
        state
        for state in named
        if state.position >= sequence.sealed or not sequence.seal_state(state.group, state.position, state.page)
    ]
    return tuple(GroupCells(group, position, (page,)) for group, position, page in kept)
