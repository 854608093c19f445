"""Refusals in background tasks are no defects; a task that breaks half-way is one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from cachesvc.model.errors import LedgerBroken, NotFound
from cachesvc.service.loop.node import Node
from tests.unit.rigs.ledger_rig import Rig, one_group, rig_of


def carried_out(rig: Rig, chores: list[Callable[[], bool]]) -> None:
    """Have a node do its chores."""

    async def main() -> None:
        node = Node(rig.core, epoch=1, wait_seconds=1.0, lease_seconds=60.0)
        vault: Any = None
        node.start(vault)
        for each in chores:
            rig.core.later(rig.model.id, each)
        node.run(lambda: None)
        for _ in range(8):
            await asyncio.sleep(0)
        await node.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "is_defect"), [(NotFound("replica", 0), False), (LedgerBroken("row 7 is not pinned"), True)]
)
def test_a_refused_chore_takes_no_model_out_of_service(error: Exception, is_defect: bool) -> None:
    rig = rig_of(one_group(), device=(8,))
    done: list[str] = []

    def refused() -> bool:
        raise error

    def other() -> bool:
        done.append("other")
        return True

    carried_out(rig, [refused, other])
    assert done == ["other"]
    assert bool(rig.model.suspect) is is_defect
    assert rig.core.counters.get("chores_refused", 0) == (not is_defect)
