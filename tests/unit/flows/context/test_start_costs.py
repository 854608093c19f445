"""Calls that begin work for thousands of blocks take as many interpreter steps as for hundreds: a swap, a load, and the
answer of a large allocation go by columns, not block by block."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cachesvc.flows.allocate import allocate, swap_in, swap_out
from cachesvc.flows.core import Turns
from cachesvc.flows.match import match, prefetch
from cachesvc.flows.pinning import evict
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import recycle
from cachesvc.model.answers import GroupCells, Wait
from tests.unit.flows.context.test_turn_costs import bare
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, rig_of
from tests.work import counted


def rig_with(blocks: int) -> tuple[Rig, str]:
    rig = rig_of(one_group(), device=(2 * blocks,), host=(2 * blocks,))
    rig.core.turns = Turns(*[1 << 20] * len(Turns()))
    return rig, rig.lease("a")


def steps_of(run: Callable[[], object]) -> int:
    with counted() as work:
        answer = run()
    assert not isinstance(answer, Wait)
    return work.steps


def own(rig: Rig, lease: str, blocks: int) -> None:
    bare(rig, match, lease, 1, b"", 0)()
    bare(rig, allocate, lease, 1, blocks)()


def shared(rig: Rig, lease: str, blocks: int) -> bytes:
    keys = chain(*range(blocks))
    bare(rig, match, lease, 1, keys, 0)()
    bare(rig, allocate, lease, 1, blocks)()
    bare(rig, publish, lease, 1, 0, b"", blocks)()
    return keys


def out_of_own(blocks: int) -> int:
    rig, a = rig_with(blocks)
    own(rig, a, blocks)
    return steps_of(bare(rig, swap_out, a, 1))


def in_of_own(blocks: int) -> int:
    rig, a = rig_with(blocks)
    own(rig, a, blocks)
    bare(rig, swap_out, a, 1)()
    rig.settle()
    return steps_of(bare(rig, swap_in, a, 1))


def out_of_shared(blocks: int) -> int:
    rig, a = rig_with(blocks)
    shared(rig, a, blocks)
    return steps_of(bare(rig, swap_out, a, 1))


def on_host(blocks: int) -> tuple[Rig, str, bytes]:
    rig, a = rig_with(blocks)
    keys = shared(rig, a, blocks)
    bare(rig, swap_out, a, 1)()
    rig.settle()
    evict(rig.core, rig.model.id, "device", 0)
    return rig, a, keys


def in_of_shared(blocks: int) -> int:
    rig, a, _ = on_host(blocks)
    return steps_of(bare(rig, swap_in, a, 1))


def match_on_host(blocks: int) -> int:
    rig, a, keys = on_host(blocks)
    return steps_of(bare(rig, match, a, 2, keys, 0))


def load(blocks: int) -> int:
    rig, a, keys = on_host(blocks)
    bare(rig, match, a, 2, keys, 0)()
    return steps_of(bare(rig, allocate, a, 2, blocks))


def fetch(blocks: int) -> int:
    rig, a, keys = on_host(blocks)
    return steps_of(bare(rig, prefetch, a, keys))


def stock_back(blocks: int) -> int:
    rig, a = rig_with(blocks)
    lease = rig.core.ledger.leases[a]
    pages = lease.grant(0, rig.place().pools[0], blocks)
    return steps_of(bare(rig, recycle, a, 0, 0, (GroupCells(0, 0, pages),)))


STARTS: dict[str, Callable[[int], int]] = {
    "swap out, own": out_of_own,
    "swap in, own": in_of_own,
    "swap out, shared": out_of_shared,
    "swap in, shared": in_of_shared,
    "match on the host": match_on_host,
    "load": load,
    "prefetch": fetch,
    "stock given back": stock_back,
}


@pytest.mark.parametrize("start", STARTS)
def test_a_start_takes_no_step_a_block(start: str) -> None:
    small, large = STARTS[start](512), STARTS[start](2048)
    assert large - small < 512, f"{small} steps for 512 blocks, {large} for 2,048"
