"""Counts the rare meetings of events that a simulation is for: what a call came upon, and how a transfer ended."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from cachesvc.flows.core import Core, Count
from cachesvc.ledger.ledger import LeaseState, Ledger, Model
from cachesvc.ledger.sequences import Hold, OpenSequence, Prefetch
from cachesvc.ledger.tickets import Ticket
from cachesvc.model.answers import Wait
from cachesvc.model.errors import PoolExhausted
from cachesvc.model.words import ABSENT, READY, Direction, Failed, Outcome

Answer = TypeVar("Answer")

MEETINGS = (
    "allocate evicts",
    "allocate drops windows",
    "allocate waits",
    "allocate refused",
    "allocate evicts beside what came since its match",
    "allocate drops windows beside those of its hit",
    "prefetch evicts",
    "prefetch waits",
    "publish waits",
    "publish evicts on the host",
    "swap in evicts",
    "swap in evicts beside what stayed",
    "swap in waits",
    "swap in refused",
    "swap in drops windows",
    "swap out evicts on the host",
    "swap out waits",
    "swap out refused",
    "load held back",
    "load failed",
    "load failed below another",
    "load of windows alone",
    "load for two",
    "load of a released sequence",
    "prefetch hurried",
    "prefetch of a lost lease",
    "drain turned back",
    "drain failed",
    "drain below another",
    "backup failed",
    "swap out failed",
    "swap in failed",
    "swap of a released sequence",
    "swap of a silent engine",
    "load from a replica failed",
    "load from a replica came",
)
"""Each must happen in the seeds of the test suite."""


class _Pressure(NamedTuple):
    """Counts that show that a call has made room."""

    evictions: int
    host_evictions: int
    windows: int


class Meetings:
    """``call`` and ``landing`` stand around what they count and change nothing."""

    def __init__(self, core: Core) -> None:
        self.seen: Counter[str] = Counter()
        self._core = core

    def call(self, lease: str, contents: object, flow: Callable[[], Answer]) -> Answer:
        """Run a flow. ``contents``: the call's name, and the sequence's id where it is for one."""
        name, sequence = _named(self._core.ledger, lease, contents)
        before, traits = self._pressure(), self._traits(name, sequence)
        try:
            answer = flow()
        except PoolExhausted:
            self.seen[f"{name} refused"] += 1
            raise
        after = self._pressure()
        evicts, drops = after.evictions > before.evictions, after.windows > before.windows
        self.seen[f"{name} evicts"] += evicts
        self.seen[f"{name} evicts on the host"] += after.host_evictions > before.host_evictions
        self.seen[f"{name} drops windows"] += drops
        self.seen[f"{name} waits"] += isinstance(answer, Wait)
        for what, happened in (("evicts", evicts), ("drops windows", drops)):
            for trait in traits if happened else ():
                self.seen[f"{name} {what} {trait}"] += 1
        return answer

    def landing(self, ticket: int, outcome: Outcome, land: Callable[[], list[int]]) -> None:
        """Land a transfer."""
        ledger = self._core.ledger
        held = ledger.tickets.running[ticket]
        failed = isinstance(outcome, Failed)
        told = self._told(held, failed=failed)
        drained = [drain.row for drain in held.drains]
        model = ledger.models[held.model]
        place = model.any_replica(held.replica).place
        ended = land()
        self.seen["load held back"] += not ended
        self.seen.update(told if ended else ())
        if ended and not failed:
            self.seen["drain turned back"] += any(place.state(row) == READY for row in drained)
        reasons = [ledger.tickets.get(each).reason for each in ended]
        self.seen["load failed below another"] += any("above it failed" in reason for reason in reasons)

    def _told(self, ticket: Ticket, *, failed: bool) -> list[str]:
        """Observations of a ticket before it lands."""
        ledger, out = self._core.ledger, []
        if ticket.traveller is not None:
            way = "out" if ticket.direction is Direction.STORE else "in"
            lease = ledger.leases.get(ticket.traveller.lease)
            out += [f"swap {way} failed"] if failed else []
            if isinstance(ticket.traveller, OpenSequence) and not ticket.traveller.is_open:
                is_silent = lease is not None and lease.state is LeaseState.QUARANTINED
                out.append("swap of a silent engine" if is_silent else "swap of a released sequence")
        elif ticket.source is not None:
            out.append(f"load from a replica {'failed' if failed else 'came'}")
        elif ticket.direction is Direction.LOAD:
            place = ledger.models[ticket.model].any_replica(ticket.replica).place
            waiting = [each for each in ticket.waiters if isinstance(each, Hold) and ticket.id in each.loads]
            out += ["load failed"] if failed else []
            out += ["load for two"] if len(waiting) > 1 else []
            out += ["load of a released sequence"] if len(waiting) < len(ticket.waiters) else []
            out += ["load of windows alone"] if all(place.state(row) == READY for row in ticket.rows) else []
            if any(isinstance(each, Prefetch) for each in ticket.waiters):
                out += ["prefetch hurried"] if any(isinstance(each, OpenSequence) for each in waiting) else []
                out += ["prefetch of a lost lease"] if not waiting else []
        else:
            out += ["backup failed"] if failed and ticket.rows else []
            out += ["drain failed"] if failed and ticket.drains else []
            out += ["drain below another"] if any(not drain.copied for drain in ticket.drains) else []
        return out

    def _pressure(self) -> _Pressure:
        core = self._core
        places = [place for model in core.ledger.models.values() for place in model.blocks.index.places]
        return _Pressure(
            core.counters.get(Count.EVICTIONS, 0),
            core.counters.get(Count.HOST_EVICTIONS, 0),
            sum(place.counts.windows_left for place in places),
        )

    def _traits(self, name: str, sequence: OpenSequence | None) -> list[str]:
        """Pages of a sequence on its device before a call that may make room for the rest of it."""
        if sequence is None or name not in ("allocate", "swap in"):
            return []
        model = self._core.ledger.models[sequence.model]
        place = model.any_replica(sequence.replica).place
        index = model.blocks.index
        if name == "swap in":
            path = index.path(sequence.host_anchor)
            return ["beside what stayed"] if any(place.state(row) != ABSENT for row in path) else []
        rows = index.path(sequence.host_anchor, sequence.anchor)
        out = ["beside what came since its match"] if any(place.state(row) != ABSENT for row in rows) else []
        return out + (["beside those of its hit"] if _has_windows(model, sequence, rows) else [])


def _has_windows(model: Model, sequence: OpenSequence, rows: array[int]) -> bool:
    """True where some, and not all, of the windowed copies that a hit still lacks are on the device."""
    place = model.any_replica(sequence.replica).place
    there = [place.states[group][row] != ABSENT for group in place.window_groups for row in rows[-2:]]
    return any(there) and not all(there)


def _named(ledger: Ledger, lease: str, contents: object) -> tuple[str, OpenSequence | None]:
    if not isinstance(contents, tuple):
        return "repeat", None
    name = {"in": "swap in", "out": "swap out"}.get(contents[0], str(contents[0]))
    number = contents[1] if len(contents) > 1 else None
    return name, _open(ledger, lease, number) if isinstance(number, int) else None


def _open(ledger: Ledger, lease_id: str, number: int) -> OpenSequence | None:
    lease = ledger.leases.get(lease_id)
    return None if lease is None else lease.sequences.get(number)
