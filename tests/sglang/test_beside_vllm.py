"""A vLLM and an SGLang engine of the same weights on one daemon: each has its own blocks, its share of pool and host,
and its own answers."""

from __future__ import annotations

import os

import pytest
from kvcache.v1 import admin_pb2

from tests.e2e.rig import Node, running_node
from tests.long_cases import IS_LONG
from tests.sglang.rig import SglangFleet
from tests.vllm.rig import BLOCK_TOKENS, PYTHON_VARIABLE, Engine, Fleet, check_daemon, engines, random_prompt

POOL_BLOCKS = 72
HOST = {"host_blocks": 96}
PROMPTS = [random_prompt(500 + each, 6.5, new=20) for each in range(12)]
"""More blocks than fit on the device, and no more than fit on the host."""

pytestmark = [
    pytest.mark.skipif(PYTHON_VARIABLE not in os.environ, reason=f"{PYTHON_VARIABLE} names no Python with vLLM"),
    pytest.mark.skipif(not IS_LONG, reason="CACHESVC_LONG=1 runs it: a minute and a second venv"),
]


def test_two_kinds_of_engines_share_one_daemon_and_no_block(fleet: SglangFleet, plain: Engine) -> None:
    expected = [answer.said for answer in plain.ask(*PROMPTS)]
    with running_node() as node:
        both = (
            fleet.engine(node.socket, POOL_BLOCKS, extra=HOST),
            Fleet(fleet.folder, "auto").engine(node.socket, POOL_BLOCKS, extra=HOST),
        )
        with engines(*both) as running:
            for engine in running:
                engine.send(*PROMPTS)
            first = [engine.collect() for engine in running]
            again = [[engine.ask(prompt)[0] for prompt in PROMPTS] for engine in running]
            shares = host_shares(node)
        assert [[answer.said for answer in answers] for answers in first] == [
            [answer.said for answer in answers] for answers in again
        ]
        assert [answer.said for answer in first[0]] == expected
        assert {answer.cached for answers in first for answer in answers} == {0}
        assert {answer.cached for answers in again for answer in answers} == {6 * BLOCK_TOKENS}
        assert shares == {"sglang": HOST["host_blocks"], "vllm": HOST["host_blocks"]}
        check_daemon(node.socket)


def host_shares(node: Node) -> dict[str, int]:
    """Pages on the host, by the kind of engine."""
    kinds = {
        each.model_id: each.model.partition("-")[0]
        for each in node.admin.ListModels(admin_pb2.ListModelsRequest()).models
    }
    pools = node.admin.GetStatus(admin_pb2.GetStatusRequest()).pools
    return {kinds[pool.model_id]: pool.capacity for pool in pools if pool.place == "host"}
