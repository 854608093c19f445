"""A dump of an index is let go in steps, for it has as many keys as the index."""

from __future__ import annotations

from typing import Any

import pytest

from cachesvc.questions.dump import KEYS_A_STEP, Arena, Columns
from cachesvc.service.access.auth import EVERYONE, set_caller
from cachesvc.service.admin.admin_service import Inspection
from cachesvc.service.loop.node import Node
from tests.unit.rigs.dispatch_rig import Desk
from tests.unit.rigs.ledger_rig import one_group, rig_of, serve


def test_keys_go_some_at_a_time() -> None:
    rig = rig_of(one_group(), device=(4,))
    keys: list[bytes | None] = [None] * (2 * KEYS_A_STEP + 1)
    steps = 0
    for _ in Columns(rig.model, keys, 0, Arena(1 << 20)).forget():
        steps += 1
        assert len(keys) == max(0, (2 - steps) * KEYS_A_STEP + 1)
    assert steps == 3


@pytest.mark.parametrize("fails", [False, True])
async def test_a_dump_holds_no_keys_once_it_was_read(fails: bool) -> None:
    rig = rig_of(one_group(), device=(16,))
    serve(rig, rig.lease("a"), 1, range(16))
    async with Desk(rig) as desk:
        inspection = _inspection(desk.node)
        set_caller(EVERYONE)
        taken: Any = None
        try:
            async with inspection.dump(0) as taken:
                assert taken.columns.blocks == 16
                assert len(taken.columns.rows(0, 16).parents) == 16
                if fails:
                    raise ConnectionError
        except ConnectionError:
            assert fails
        with pytest.raises(IndexError):
            taken.columns.rows(0, 16)


def _inspection(node: Node) -> Inspection:
    checksums: Any = None  # a dump takes none
    return Inspection(node, checksums)
