"""Calls of vLLM's manager that the connector skips would have changed nothing."""

from __future__ import annotations

import json

import pytest

from tests.e2e.rig import running_node
from tests.long_cases import long
from tests.vllm.rig import forker


@pytest.mark.parametrize("seed", [1, long(2)])
def test_a_request_that_has_room_and_fills_no_block_needs_nothing_of_vllm(seed: int) -> None:
    with running_node([]) as node:
        told = json.loads(forker().run("tests.vllm.allocations", node.socket, str(seed))[-1])
        assert min(told["idle"], told["busy"], told["ended"]) >= 300
