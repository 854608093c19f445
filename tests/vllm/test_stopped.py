"""An engine whose processes are all stopped for longer than its lease, as those of a container that is frozen."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.rig import running_node, wait_until
from tests.vllm.long_cases import long
from tests.vllm.rig import engines, make_saved_fleet, random_prompt

DEVICE_BLOCKS = 72


@pytest.mark.parametrize(("is_split", "ranks"), [(False, 1), long(True, 1), (True, 2)])
def test_an_engine_that_was_stopped_says_nothing_of_what_others_wrote(
    tmp_path: Path, is_split: bool, ranks: int
) -> None:
    """It goes on; or it ends, where that was between a step and the taking of its output."""
    fleet = make_saved_fleet(tmp_path)  # weights by which what is read matters
    head = random_prompt(70, 20).tokens
    prompts = [random_prompt(71 + each, 0.5, new=300, head=head) for each in range(4)]
    others = [random_prompt(80 + each, 30.5, new=1) for each in range(6)]
    options = {"tensor_parallel_size": ranks}
    with engines(fleet.engine(None, caching=False, is_split=is_split, options=options)) as (plain,):
        expected = [answer.said for answer in plain.ask(*prompts)]
    with running_node(["--lease-seconds", "2", "--shm-devices", str(ranks)]) as node:
        both = [fleet.engine(node.socket, DEVICE_BLOCKS, is_split=is_split, options=options) for _ in range(2)]
        with engines(*both) as (frozen, other):
            frozen.ask(random_prompt(90, 0.5, new=1, head=head))
            frozen.send(*prompts)
            wait_until(lambda: node.counters()["published_blocks"] >= 20 + 4, "all decode behind their hits")
            os.killpg(frozen.process.pid, signal.SIGSTOP)
            wait_until(lambda: list(node.lease_states().values()).count("live") == 1, "its lease is lost")
            for prompt in others:
                other.ask(prompt)
            os.killpg(frozen.process.pid, signal.SIGCONT)
            answers = frozen.collect_unless_ended()
            assert answers is None or [answer.said for answer in answers] == expected
            assert answers is None or [answer.said for answer in frozen.ask(*prompts)] == expected
