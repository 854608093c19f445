"""Candidates of eviction, and the blocks known to a policy that follows requests, recounted naively."""

from __future__ import annotations

from collections.abc import Iterator

from cachesvc.ledger.candidates import CopyQueues, LeafOrder, QueuedLeaves
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.retention import SPENT, window_rank
from cachesvc.ledger.tier_copies import Place
from cachesvc.model.words import FILLING, READY
from cachesvc.policy.hazard import History


def candidates(model: Model, place: Place) -> Iterator[str]:
    """Check that exactly the candidates of eviction are filed, each under its rank."""
    blocks, index = model.blocks, model.blocks.index
    states = place.states[place.lead]
    wanted = [
        blocks.rank(index.stamp[row], index.hits[row], index.depth[row]) - place.is_spent(row) * SPENT << 32 | row
        for row in index.rows.values()
        if states[row] == READY and not (place.pins[row] or place.children[row] or index.flights[row])
    ]
    yield from _order(f"{place.name}", place.leaves, wanted)
    for group, order in place.window_leaves.items():
        sinks = model.layout.sink_blocks(group)

        def rank(row: int, sinks: int = sinks, order: LeafOrder = order) -> int:
            if isinstance(order, CopyQueues):
                return order.rank(row)
            return window_rank(index.reached[row], index.stamp[row], index.depth[row], index.depth[row] < sinks)

        wanted = [
            rank(row) << 32 | row
            for row in index.rows.values()
            if place.states[group][row] == READY
            and not place.window_pins[group][row]
            and not any(each.states[group][row] == FILLING for each in (*index.places, *index.lost))
        ]
        yield from _order(f"{place.name} group {group}", order, wanted)


def _order(where: str, order: LeafOrder, wanted: list[int]) -> Iterator[str]:
    entries = list(order)
    for entry in set(entries) ^ set(wanted):
        row = entry & 0xFFFF_FFFF
        yield f"{where} row {row}: {'filed as a candidate' if entry in entries else 'may be evicted, but is not filed'}"
    parts = [entries]
    if isinstance(order, QueuedLeaves):
        parts = [list(queue) for queue in order.queues]
    elif isinstance(order, CopyQueues):
        parts = [list(queue) for queue in order.queues.values()]
    if any(part != sorted(part) for part in parts) or len(entries) != len(order):
        yield f"{where}: {len(order)} candidates are counted, {len(entries)} are there, or not in their order"
    if {row for row, filed in enumerate(order.filed) if filed} != {entry & 0xFFFF_FFFF for entry in entries}:
        yield f"{where}: what is filed and what is known to be filed are not the same"


def segments(model: Model) -> Iterator[str]:
    """The policy knows of each resident block whose it is, and of nothing that is gone."""
    blocks, index = model.blocks, model.blocks.index
    history = blocks.chooser
    if not isinstance(history, History) or index.taking is not None:  # a request has not taken over its whole path yet
        return
    columns = history.segments
    held: dict[int, list[int]] = {}
    for row in index.rows.values():
        held.setdefault(index.segments[row], []).append(index.depth[row])
    held.pop(0, None)
    for slot, depths in held.items():
        if sorted(depths) != list(range(columns.top[slot], columns.bottom[slot])):
            told = range(columns.top[slot], columns.bottom[slot])
            yield f"model {model.id} segment {slot}: has blocks at {sorted(depths)}, and is said to have {told}"
    known = {slot for parts in history.remembered for slot in (parts.shared, parts.own)}
    known |= {slot for parts in history.running for slot in (parts.shared, parts.own)}
    if len(columns) != len((known | held.keys()) - {0}):
        yield f"model {model.id}: {len(columns)} segments are kept, {len((known | held.keys()) - {0})} are needed"


def lost(model: Model) -> Iterator[str]:
    """Lost places are seen by no flow, and are kept only as long as something of theirs is left, or under way."""
    index = model.blocks.index
    present, gone = [replica.place for replica in model.replicas], [replica.place for replica in model.lost]
    if index.places != [model.blocks.host, *present] or index.lost != gone:
        yield f"model {model.id}: the places are not those of the host and of its replicas"
    orders = [order for place in index.places for order in (place.leaves, *place.window_leaves.values())]
    if {id(order) for order in orders} != {id(order) for order in index.orders}:
        yield f"model {model.id}: candidates are known of other places than there are"
    numbers = [place.number for place in (*index.places, *gone)]
    if len(set(numbers)) < len(numbers) or any(replica.place.number != replica.id + 1 for replica in model.replicas):
        yield f"model {model.id}: places have the numbers {numbers}"
