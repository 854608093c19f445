"""Small turns, so that whatever takes more than a few pages is cut."""

from __future__ import annotations

from typing import Any

from cachesvc.flows.allocate import allocate
from cachesvc.flows.core import Turns
from cachesvc.flows.match import match
from tests.unit.rigs.ledger_rig import Rig, one_group, rig_of, serve

SMALL = Turns(evicted=2, landed=2, drained=2, holds=2, pages=2, sealed=2)


def full(pages: int, host: int = 0, **fields: Any) -> tuple[Rig, str, str]:
    """A pool full of cold blocks, one prompt each, and two leases."""
    rig = rig_of(one_group(), device=(pages,), host=(host,), **fields)
    a, b = rig.lease("a"), rig.lease("b")
    for number in range(pages):
        serve(rig, b, number + 1, [number])
    rig.core.turns = SMALL
    return rig, a, b


def own(rig: Rig, lease: str, sequence: int, blocks: int) -> None:
    rig.run(match, lease, sequence, b"", 0)
    rig.run(allocate, lease, sequence, blocks)


def reserved(rig: Rig) -> int:
    return rig.place().pools[0].reserved
