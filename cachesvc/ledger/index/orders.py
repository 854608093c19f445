"""Rows of a place that may go, and their order: what ``candidates.py`` files, read from the ledger's columns."""

from __future__ import annotations

from collections.abc import Callable

from cachesvc.ledger.index.block_index import BlockIndex
from cachesvc.ledger.index.tier_copies import Place
from cachesvc.ledger.order.candidates import LeafOrder, Rank
from cachesvc.ledger.order.class_queues import EvictionPolicy, QueuedLeaves
from cachesvc.model.words import FILLING, READY, STAMP_BITS

DEPTH_BITS = 32
SPENT = 1 << 100
"""Leaves behind which no prompt can go on have ranks that are lower by this: they go before all others."""
RankRule = Callable[[int, int, int], Rank]
"""``(stamp, hits, depth) -> rank``: the eviction policy; the lowest rank goes first."""


def leaf_order(index: BlockIndex, place: Place, rule: RankRule, chooser: EvictionPolicy | None) -> LeafOrder:
    """Leaves of a place that are unpinned and not in flight, in the order of the eviction policy."""
    states, pins, children = place.states[place.lead], place.pins, place.children
    flights, stamp, hits, depth = index.flights, index.stamp, index.hits, index.depth

    def may_go(row: int) -> bool:
        return states[row] == READY and not (pins[row] or children[row] or flights[row])

    def by_rule(row: int) -> Rank:
        return rule(stamp[row], hits[row], depth[row])

    def spent_first(row: int) -> Rank:
        return by_rule(row) - SPENT if place.is_spent(row) else by_rule(row)

    rank = spent_first if place.spent_by else by_rule
    if chooser is not None:
        return QueuedLeaves(may_go, rank, chooser, index.segments, depth)
    return LeafOrder(may_go, rank)


def window_order(index: BlockIndex, place: Place, group: int, sinks: int) -> LeafOrder:
    """Windowed copies of a place that no window holds and no transfer reads: they may go by themselves, whatever other
    groups' copies of their block do. ``sinks``: first blocks of a prompt that count as such."""
    states, pins, places = place.states[group], place.window_pins[group], index.told
    reached, stamp, depth = index.reached, index.stamp, index.depth

    def may_go(row: int) -> bool:
        if states[row] != READY or pins[row]:
            return False
        return all(other.states[group][row] != FILLING for other in places)  # from this copy, perhaps

    def rank(row: int) -> Rank:
        return window_rank(reached[row], stamp[row], depth[row], depth[row] < sinks)

    return LeafOrder(may_go, rank)


def window_rank(reached: int, stamp: int, depth: int, is_sink: bool) -> Rank:
    """The order in which windowed copies go by themselves.

    First those that no hit has looked back to and no sequence has ended on, then by when that was; of equal rank
    oldest first and a prompt's front before its end, but its sinks last: without them no window is worth anything.
    """
    return ((reached << 1 | is_sink) << STAMP_BITS | stamp) << DEPTH_BITS | depth
