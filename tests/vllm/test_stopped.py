"""An engine whose processes are all stopped for longer than its lease, as those of a container that is frozen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.rig import running_node
from tests.long_cases import long
from tests.vllm.rig import engines, make_saved_fleet
from tests.vllm.scenarios import DECODING, stop_until_lost

DEVICE_BLOCKS = 72


@pytest.mark.parametrize(
    ("is_split", "ranks", "of"),
    [(False, 1, "tensor"), long(True, 1, "tensor"), (True, 2, "tensor"), long(True, 2, "pipeline")],
)
def test_an_engine_that_was_stopped_says_nothing_of_what_others_wrote(
    tmp_path: Path, is_split: bool, ranks: int, of: str
) -> None:
    fleet = make_saved_fleet(tmp_path)  # weights by which what is read matters
    options = {f"{of}_parallel_size": ranks}
    with engines(fleet.engine(None, caching=False, is_split=is_split, options=options)) as (plain,):
        expected = [answer.said for answer in plain.ask(*DECODING)]
    with running_node(["--lease-seconds", "2", "--shm-devices", str(ranks)]) as node:
        both = [fleet.engine(node.socket, DEVICE_BLOCKS, is_split=is_split, options=options) for _ in range(2)]
        with engines(*both) as (frozen, other):
            stop_until_lost(node, frozen, other, expected)
