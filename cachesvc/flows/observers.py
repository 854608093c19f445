"""Observers of flows: statistics, events and what the eviction policy learns. Flows decide nothing by them."""

from __future__ import annotations

from cachesvc.flows.call import Call
from cachesvc.flows.core import Core
from cachesvc.flows.counters import Count
from cachesvc.flows.turns import NO_MODEL, Chore
from cachesvc.ledger.blocks import Hit
from cachesvc.ledger.requests import PromptPath, Request
from cachesvc.ledger.sequences import Sequence
from cachesvc.model.keys import KEY_BYTES


def matched(
    core: Core,
    call: Call,
    sequence: Sequence,
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
    model.hit_blocks["device"] += hit.device_blocks
    model.hit_blocks["host"] += hit.blocks - hit.device_blocks - stored
    model.hit_blocks["storage"] += stored
    came = call.now - waited if clock is None else clock
    sequence.recent = model.recent.add(came, keys, core.limits.recent_blocks // len(core.ledger.models))
    asked = min(blocks, max_blocks) if max_blocks else blocks
    has_windows = bool(replica.place.window_groups)
    model.reuse.matched(model.blocks.index, keys, asked, hit.blocks, has_windows=has_windows)
    if replica.shadow is not None and core.eviction.learns:
        replica.shadow.matched(keys, asked, hit.device_blocks)
    if model.blocks.chooser is not None:
        _follow(core, call, sequence, hit.blocks, waited)


def _follow(core: Core, call: Call, sequence: Sequence, hit_blocks: int, waited: float) -> None:
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
