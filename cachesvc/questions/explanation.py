"""What became of a block: where its copies are, who keeps them there, what happened last. Looks only."""

from __future__ import annotations

from typing import NamedTuple

from cachesvc.flows.core import Core
from cachesvc.ledger.journal import Cause, Event
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.place import NO_ROW
from cachesvc.ledger.sequences import Sequence
from cachesvc.questions.query import BlockLine, block_line

HOLDERS_LISTED = 64

REASONS = {
    Cause.PUBLISHED: "an engine published it",
    Cause.LOADED: "a load brought it",
    Cause.BACKED_UP: "a backup brought it",
    Cause.COPY_FAILED: "the transfer that was to bring it failed",
    Cause.EVICTED: "it was evicted for others that needed the room",
    Cause.DRAINED: "it was evicted for others that needed the room, after it had been saved on the host",
    Cause.WINDOW_EVICTED: "no window looked back to it and others needed the room",
    Cause.OPERATOR: "an operator evicted it",
}


class Holder(NamedTuple):
    """A sequence that keeps a block on a place. ``blocks_below``: how much deeper it reaches through it."""

    lease: str
    engine: str
    sequence: int
    place: int
    blocks_below: int


class Story(NamedTuple):
    """All that is known of one key. ``block`` is None where no copy is left. ``events``: the newest first."""

    model: Model
    key: bytes
    block: BlockLine | None
    holders: list[Holder]
    holders_truncated: bool
    tickets: list[int]
    events: list[Event]
    accesses_since: int
    verdict: str


def story(core: Core, model: Model, key: bytes, events: list[Event], now: float) -> Story:
    """Tell one key's story; ``events`` are what its model's journal knows of it, oldest first."""
    index = model.blocks.index
    row = index.rows.get(key, NO_ROW)
    newest_first = events[::-1]
    if row == NO_ROW:
        return Story(model, key, None, [], False, [], newest_first, 0, _why_not(model, newest_first, now))
    holders = holders_of(core, model, row)
    tickets = [
        ticket.id
        for ticket in core.ledger.tickets.running.values()
        if ticket.model == model.id and (row in ticket.rows or any(drain.row == row for drain in ticket.drains))
    ]
    return Story(
        model,
        key,
        block_line(model, row),
        holders[:HOLDERS_LISTED],
        len(holders) > HOLDERS_LISTED,
        tickets,
        newest_first,
        core.ledger.last_stamp - index.stamp[row],
        _why_here(model, row, holders, tickets),
    )


def holders_of(core: Core, model: Model, row: int) -> list[Holder]:
    """Sequences that keep ``row`` where it is, by themselves or through a block below it; a few more than are listed.

    A key stands for its whole prefix, so a sequence goes through a block when it has the same key at that depth.
    """
    index = model.blocks.index
    depth, key = index.depth[row], index.keys[row]
    found: list[Holder] = []
    for lease in core.ledger.leases.values():
        if lease.model != model.id:
            continue
        for sequence in lease.sequences.values():
            if len(found) > HOLDERS_LISTED:
                return found
            if sequence.known_keys <= depth or sequence.key(depth) != key:
                continue
            for place, anchor in _anchors(sequence):
                below = index.depth[anchor] - depth
                if below >= 0:
                    found.append(Holder(lease.id, lease.engine, sequence.id, place, below))
    return found


def _anchors(sequence: Sequence) -> list[tuple[int, int]]:
    """The rows that a sequence has pinned, with the number of their place."""
    out: list[tuple[int, int]] = []
    if sequence.anchor != NO_ROW and (not sequence.swapped_out or sequence.swap_ticket):
        out.append((sequence.replica + 1, sequence.anchor))
    if sequence.host_anchor != NO_ROW:
        out.append((0, sequence.host_anchor))
    return out


def _why_here(model: Model, row: int, holders: list[Holder], tickets: list[int]) -> str:
    index = model.blocks.index
    if holders:
        own = sum(not holder.blocks_below for holder in holders)
        through = len(holders) - own
        return f"it stays: {own} pins on it, {through} on blocks below it; only a release or a lost lease ends them"
    if tickets:
        return f"it stays while ticket {tickets[0]} moves it"
    if index.children[row]:
        return f"it stays before its {index.children[row]} children go: blocks leave leaf first"
    return "nothing keeps it: it goes when others need the room and its turn has come"


def _why_not(model: Model, newest_first: list[Event], now: float) -> str:
    journal = model.blocks.journal
    for event in newest_first:
        if not event.present:
            return f"it is not here: {now - event.seconds:.1f} s ago {REASONS[event.cause]}"
    if journal.first > 1:
        return f"it is not here, and none of the last {journal.keep} changes of its model was about it"
    return "it is not here and never was, since the daemon started or its model was registered"
