"""A vLLM and an SGLang engine of the same weights on one daemon: each has its own blocks, and its own answers."""

from __future__ import annotations

import os

import grpc
import pytest
from kvcache.v1 import admin_pb2, admin_pb2_grpc

from tests.e2e.rig import running_node
from tests.sglang.rig import SglangFleet
from tests.vllm.rig import BLOCK_TOKENS, PYTHON_VARIABLE, Engine, Fleet, check_daemon, engines, random_prompt


@pytest.mark.skipif(PYTHON_VARIABLE not in os.environ, reason=f"{PYTHON_VARIABLE} names no Python with vLLM")
def test_two_kinds_of_engines_use_one_daemon_and_share_no_block(fleet: SglangFleet, plain: Engine) -> None:
    prompts = [random_prompt(500 + each, 6.5, new=40) for each in range(8)]
    expected = [answer.said for answer in plain.ask(*prompts)]
    with running_node() as node:
        both = fleet.engine(node.socket, 72), Fleet(fleet.folder).engine(node.socket, 72)
        with engines(*both) as (mine, other):
            for engine in (mine, other):
                engine.send(*prompts)  # more than fit at a time
            first = [engine.collect() for engine in (mine, other)]
            again = [[engine.ask(prompt)[0] for prompt in prompts] for engine in (mine, other)]
        assert [answer.said for answer in first[0]] == [answer.said for answer in again[0]] == expected
        assert [answer.said for answer in first[1]] == [answer.said for answer in again[1]]
        assert {answer.cached for answers in first for answer in answers} == {0}
        assert {answer.cached for answers in again for answer in answers} == {6 * BLOCK_TOKENS}
        with grpc.insecure_channel(f"unix:{node.socket}") as channel:
            models = admin_pb2_grpc.AdminServiceStub(channel).ListModels(admin_pb2.ListModelsRequest()).models
        assert {each.model.partition("-")[0] for each in models} == {"sglang", "vllm"}
        check_daemon(node.socket)
