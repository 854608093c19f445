"""States that are published after their blocks: where blocks are copied to the host when sealed, these follow."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cachesvc.flows.context.core import Core
from cachesvc.flows.context.turns import begin
from cachesvc.flows.transfer.make_room import make_cheap_host_room
from cachesvc.flows.transfer.transfers import may_submit, store_pairs, submit
from cachesvc.ledger.index.tier_copies import NO_ROW
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.model.transfer import Direction, Urgency
from cachesvc.model.words import ABSENT, READY


@dataclass(slots=True, eq=False)
class LateState:
    """A state whose block is on its way to the host: it follows when that has come."""

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
        """Copy the state, unless its block is gone."""
        row = self.model.blocks.index.rows.get(self.key, NO_ROW)
        if row != NO_ROW and not self.replica.gone:
            back_up_states(self.core, self.model, self.replica, [(self.group, row)])
        return True


def back_up_states(core: Core, model: Model, replica: Replica, states: Iterable[tuple[int, int]]) -> None:
    """Copy states, ``(group, row)``, to the host where their blocks are there, or follow them there. Best effort, as of
    ``back_up``: a state that finds no room stays on the device alone."""
    blocks, place, host = model.blocks, replica.place, model.blocks.host
    due = [array("i") for _ in place.pools]
    for group, row in states:
        is_here = place.states[place.lead][row] == READY == place.states[group][row]  # a drain frees both
        if not is_here or host.states[group][row] != ABSENT:
            continue
        if host.filling[row]:
            key = blocks.index.key_of(row)
            core.ledger.tickets.running[host.filling[row]].waiters.append(LateState(core, model, replica, group, key))
        elif host.states[host.lead][row] == READY and _has_page(core, model, group, due):
            due[group].append(row)
    rows = array("i", dict.fromkeys(row for each in due for row in each))
    if rows and may_submit(core, model, replica):
        ticket = core.ledger.tickets.open(model.id, replica.id, Direction.STORE, Urgency.BACKGROUND)
        ticket.rows = rows
        submit(core, model, ticket, store_pairs(place, blocks.start_fill(host, due, ticket.id)), layered=False)


def _has_page(core: Core, model: Model, group: int, due: Sequence[Sequence[int]]) -> bool:
    """True where the host has a page for one more state of a group, beside those that are ``due`` of its pool."""
    host = model.blocks.host
    pool, shared = host.pools[group], next(groups for groups in host.shares if group in groups)
    taken = sum(len(due[each]) for each in shared)
    if pool.unreserved <= taken:
        make_cheap_host_room(core, model, 1)
    return pool.unreserved > taken
