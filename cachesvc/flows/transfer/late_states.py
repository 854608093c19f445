"""Windows and states that prompts need after their blocks were copied to the host: they follow these there.

A state may be published after its block. And room is made on the host for those copies of a block alone that a prompt
is known to need; a later hit, or a sequence that ends, makes others needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from cachesvc.flows.context.core import Core
from cachesvc.flows.context.turns import begin
from cachesvc.flows.transfer.make_room import make_host_room
from cachesvc.flows.transfer.transfers import may_submit, store_pairs, submit
from cachesvc.ledger.index.tier_copies import NO_ROW
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.model.transfer import Direction, Urgency
from cachesvc.model.words import ABSENT, READY


@dataclass(slots=True, eq=False)
class LateCopy:
    """A windowed copy whose block is on its way to the host: it follows when that has come."""

    core: Core
    model: Model
    replica: Replica
    group: int
    key: bytes

    def load_ended(self, ticket: int, reason: str) -> None:
        """The block has come to the host, or failed to."""
        del ticket
        if not reason:
            begin(self.core.chores, self.model.id, self.follow)

    def follow(self) -> bool:
        """Copy it, unless its block is gone."""
        row = self.model.blocks.index.rows.get(self.key, NO_ROW)
        if row != NO_ROW and not self.replica.gone:
            back_up_copies(self.core, self.model, self.replica, [(self.group, row)])
        return True


def back_up_copies(core: Core, model: Model, replica: Replica, copies: Iterable[tuple[int, int]]) -> None:
    """Copy windowed copies, ``(group, row)``, to the host where their blocks are there, or follow them there. Best
    effort, as of ``back_up``: a copy that finds no room stays on the device alone."""
    blocks, place, host = model.blocks, replica.place, model.blocks.host
    if not host.usable_blocks:
        return
    due = [array("i") for _ in place.pools]
    for group, row in copies:
        is_here = place.states[place.lead][row] == READY == place.states[group][row]  # a drain frees both
        if not is_here or host.states[group][row] != ABSENT:
            continue
        if host.filling[row]:
            key = blocks.index.key_of(row)
            core.ledger.tickets.running[host.filling[row]].waiters.append(LateCopy(core, model, replica, group, key))
        elif host.states[host.lead][row] == READY:
            due[group].append(row)
    if not any(due) or not may_submit(core, model, replica):
        return
    own = frozenset(row for each in due for row in each)
    make_host_room(core, model, list(map(len, due)), own.__contains__)
    for groups in host.shares:
        left = host.pools[groups[0]].unreserved
        for group in groups:
            due[group] = due[group][max(0, len(due[group]) - left) :]
            left -= len(due[group])
    rows = array("i", dict.fromkeys(row for each in due for row in each))
    if rows:
        ticket = core.ledger.tickets.open(model.id, replica.id, Direction.STORE, Urgency.BACKGROUND)
        ticket.rows = rows
        submit(core, model, ticket, store_pairs(place, blocks.start_fill(host, due, ticket.id)), layered=False)
