"""Requests of a model with a full group, a window and states, all of one pool."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from cachesvc.flows.allocate import allocate
from cachesvc.flows.match import match
from cachesvc.flows.publish import Publishing, publish
from cachesvc.flows.recycle import recycle, release
from cachesvc.ledger.sequences import OpenSequence
from cachesvc.model.answers import GroupCells
from cachesvc.model.words import KEY_BYTES, READY, WritePolicy
from tests.unit.rigs.ledger_rig import Rig, chain, hybrid, rig_of

FULL, WINDOW, STATE = range(3)


class Ends(NamedTuple):
    """A layout's rig and its lease."""

    rig: Rig
    lease: str


def begin(device: int, host: int = 0, policy: WritePolicy = WritePolicy.WRITE_BACK) -> Ends:
    rig = rig_of(hybrid(), device=(device,) * 3, host=(host,) * 3, policy=policy)
    return Ends(rig, rig.lease())


def sequence_of(ends: Ends, number: int) -> OpenSequence:
    return ends.rig.core.ledger.leases[ends.lease].sequences[number]


def compute(ends: Ends, number: int, prompt: str, states: tuple[int, ...] = ()) -> OpenSequence:
    """Match, allocate with states in some blocks, publish all."""
    rig, lease = ends
    keys = chain(*prompt)
    rig.run(match, lease, number, keys, 0)
    sequence = sequence_of(ends, number)
    wanted = [position for position in states if position >= sequence.hit_blocks]
    rig.run(partial(allocate, positions={STATE: wanted}), lease, number, len(prompt))
    for ticket in list(sequence.loads):
        rig.land(ticket)
    first = sequence.sealed
    cells = tuple(GroupCells(STATE, at, (sequence.tables[STATE][at],)) for at in wanted)
    rig.run(publish, lease, number, first, keys[first * KEY_BYTES :], len(prompt) - first, Publishing(), cells)
    return sequence


def serve(ends: Ends, number: int, prompt: str, states: tuple[int, ...] = (), *, goes_on: bool = False) -> None:
    """``goes_on``: it computes a part of the block behind the prompt before it ends, and needs no state but that."""
    compute(ends, number, prompt, states)
    if goes_on:
        ends.rig.run(partial(recycle, dead_blocks=(0, len(prompt))), ends.lease, number, 0, ())
    ends.rig.run(release, ends.lease, number)


def hit(ends: Ends, number: int, prompt: str) -> tuple[int, int, int]:
    found = ends.rig.run(match, ends.lease, number, chain(*prompt), 0)
    ends.rig.run(release, ends.lease, number)
    return found.device_blocks, found.host_blocks, found.full_blocks


def copies(ends: Ends, group: int) -> int:
    return sum(state == READY for state in ends.rig.place().states[group])
