"""What a hit relies on between Match and Allocate beyond its deepest blocks: the windowed copies still to be brought.

A pin protects blocks, and a window's pin what the device has in place. But of a hit that must be loaded in part, the
last window may lie partly on the host and partly on the device behind what is in place: both would go by themselves.
"""

from __future__ import annotations

from cachesvc.ledger.blocks import HOST_PLACE, Hit, window_positions
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.place import Place
from cachesvc.ledger.sequences import Sequence
from cachesvc.model.words import READY


def hold(model: Model, place: Place, sequence: Sequence, hit: Hit) -> None:
    """Keep the windowed copies of a hit behind its ``device_blocks`` where they are: on the device, or on the host."""
    blocks, host = model.blocks, model.blocks.host
    if hit.blocks == hit.device_blocks or not place.window_groups:
        return
    path = blocks.index.path(hit.row, hit.device_row)
    deepest = -1
    for group in place.window_groups:
        for position in window_positions(model.layout, group, hit.blocks):
            at = position - hit.device_blocks
            if at < 0:
                continue
            row = path[at]
            if place.states[group][row] == READY:
                deepest = max(deepest, at)
                _pin(model, sequence, place.number, group, row)
            elif host.states[group][row] == READY:
                _pin(model, sequence, HOST_PLACE, group, row)
    if deepest >= 0:
        blocks.pin(place, path[deepest])
        sequence.hit_pins.append((place.number, None, path[deepest]))


def _pin(model: Model, sequence: Sequence, number: int, group: int, row: int) -> None:
    model.blocks.pin_window(model.blocks.index.places[number], group, row)
    sequence.hit_pins.append((number, group, row))


def release(model: Model, sequence: Sequence) -> None:
    """The loads have begun, or never will."""
    for number, group, row in sequence.hit_pins:
        place = model.blocks.index.places[number]
        if group is None:
            model.blocks.unpin(place, row)
        else:
            model.blocks.unpin_window(place, group, row)
    sequence.hit_pins.clear()
