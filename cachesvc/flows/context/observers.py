"""Observers of flows: statistics, events and what the eviction policy learns. Flows decide nothing by them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from cachesvc.flows.context.call import Call
from cachesvc.flows.context.core import Core
from cachesvc.flows.context.counters import Count
from cachesvc.flows.context.turns import NO_MODEL, Chore
from cachesvc.ledger.block_tables import Sealed
from cachesvc.ledger.index.block_ledger import Hit
from cachesvc.ledger.index.requests import PromptPath, Request
from cachesvc.ledger.index.reuse_stats import Miss
from cachesvc.ledger.index.tier_copies import NO_ROW
from cachesvc.ledger.sequences import OpenSequence
from cachesvc.ledger.tickets import Ticket
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.transfer import Direction
from cachesvc.model.words import READY, Tier

GHOSTS_LOOKED = 1024
"""Blocks of a prompt that have left the cache and are looked up, the deepest of them."""


def matched(
    core: Core,
    call: Call,
    sequence: OpenSequence,
    hit: Hit,
    stored: int,
    max_blocks: int,
    waited: float,
    clock: float | None,
) -> None:
    """A Match has opened ``sequence`` on a hit, ``stored`` blocks of which came from storage. ``max_blocks``: its
    limit, 0 for none. ``waited``: seconds that its request had been queued. ``clock``: its engine's time, if told."""
    model, replica, keys = call.model, call.replica, bytes(sequence.keys)
    blocks, counters = len(keys) // KEY_BYTES, core.counters
    for name, amount in ((Count.MATCH_REQUESTS, 1), (Count.MATCH_BLOCKS, blocks)):
        counters[name._value_] = counters.get(name._value_, 0) + amount
    from_host = hit.blocks - hit.device_blocks
    passed_on = max(0, stored - from_host)  # a prefix in pieces: these are on the device by now
    model.hit_blocks["device"] += hit.device_blocks - passed_on
    model.hit_blocks["host"] += from_host - (stored - passed_on)
    model.hit_blocks["storage"] += stored
    for group, shorter in hit.lost:
        model.lost_blocks["state" if group in model.layout.state_groups else "window"] += shorter
    came = call.now - waited if clock is None else clock
    sequence.remember(model.recent.add(came, keys, core.limits.recent_blocks // len(core.ledger.models)))
    asked = min(blocks, max_blocks) if max_blocks else blocks
    has_windows = bool(replica.place.window_groups)
    model.reuse.matched(model.blocks.index, keys, asked, hit.blocks, has_windows=has_windows)
    if replica.shadow is not None and core.eviction.learns:
        replica.shadow.matched(keys, asked, hit.device_blocks)
    if model.blocks.chooser is not None:
        _follow(core, call, sequence, hit.blocks, waited)
    if model.blocks.retention is not None:
        _value_positions(core, call, keys, hit)


def sealed_new(core: Core, call: Call, keys: Seq[bytes], paths: Seq[Seq[int]]) -> None:
    """Blocks under ``keys`` that were new have been sealed, in the rows ``paths`` of their sequences."""
    model = call.model
    model.reuse.computed_all(keys)
    model.reuse.published += len(keys)
    for listener in core.on_sealed:
        for path in paths:
            listener(model.id, call.replica.id, path[-1], len(path))
    core.count(Count.PUBLISHED_BLOCKS, len(keys))


def sealing(core: Core, call: Call, keys: bytes, rows: Seq[int]) -> None:
    """Blocks in ``rows`` (NO_ROW: a new one), under packed ``keys``, are about to be sealed: count what was computed,
    and what for the second time."""
    model, place = call.model, call.replica.place
    reuse, host, states = model.reuse, model.blocks.host, place.states[place.lead]
    index = model.blocks.index
    for at, row in enumerate(rows):
        if row == NO_ROW or (index.losses and not index.has_copy(row)):
            reuse.computed(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])
        elif states[row] >= READY:
            reuse.computed_again(Tier.DEVICE.value, Miss.DUPLICATE)
        else:
            tier = Tier.HOST if host.is_present(row) else Tier.DEVICE
            reuse.computed_again(tier.value, Miss.ELSEWHERE)
    reuse.published += len(rows)


def sealed_known(core: Core, call: Call, sequence: OpenSequence, blocks: int, sealed: Sealed) -> None:
    """Blocks of a sequence have been sealed, ``blocks`` with those that others had sealed first."""
    for listener in core.on_sealed if sequence.anchor != NO_ROW else ():
        listener(call.model.id, call.replica.id, sequence.anchor, blocks)
    core.count(Count.PUBLISHED_BLOCKS, len(sealed.rows))
    core.count(Count.DUPLICATE_BLOCKS, len(sealed.doubles))


def landed(core: Core, ticket: Ticket, blocks: int) -> None:
    """Blocks of a ticket have landed, or failed to."""
    if ticket.direction is not Direction.LOAD:
        return
    if ticket.failing:
        core.ledger.models[ticket.model].reuse.unloaded += blocks
    if ticket.source is not None:
        core.count(Count.PEER_BLOCKS, 0 if ticket.failing else blocks)


def ended(core: Core, ticket: Ticket) -> None:
    """A ticket has ended, and nothing of it is left to be settled."""
    core.count(Count.TICKETS_FAILED if ticket.reason else Count.TICKETS_DONE)


def _value_positions(core: Core, call: Call, keys: bytes, hit: Hit) -> None:
    """Have the eviction policy learn where requests continue, of those blocks too that have left the cache."""
    blocks, full = call.model.blocks, hit.full_blocks
    if blocks.retention is not None:

        def key(position: int) -> bytes:
            return keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]

        asked = len(keys) // KEY_BYTES
        known = call.model.reuse.known(blocks.index, keys, hit.blocks, asked)[1]
        beyond = map(key, range(known - 1, max(full, known - GHOSTS_LOOKED) - 1, -1))
        blocks.retention.arrived(blocks.index.rows.get(key(full - 1), NO_ROW) if full else NO_ROW, asked, beyond)
        if (lesson := blocks.retention.rule.lesson()) is not None:
            core.chores.append(Chore(NO_MODEL, lesson))


def _follow(core: Core, call: Call, sequence: OpenSequence, hit_blocks: int, waited: float) -> None:
    """Have the eviction policy follow the request from now on: blocks that it uses are its own."""
    model, keys = call.model, bytes(sequence.keys)
    blocks = model.blocks
    if blocks.chooser is not None:
        resident, known = model.reuse.known(blocks.index, keys, hit_blocks, len(keys) // KEY_BYTES)
        path = PromptPath(blocks.index, keys, known, resident)
        sequence.follow(Request(blocks.chooser, blocks.index, path, blocks.clock.seconds, waited))
        if blocks.index.taking is not None:
            core.chores.append(Chore(NO_MODEL, blocks.index.take_over))
        if (lesson := blocks.chooser.lesson()) is not None:
            core.chores.append(Chore(NO_MODEL, lesson))
