"""Engines of a pipeline of stages: every answer is that of vLLM with the same stages and without a cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.rig import Node, running_node
from tests.vllm.rig import BLOCK_TOKENS, Engine, Fleet, engines, make_saved_fleet, random_prompt

DEVICE_BLOCKS = 72
"""A request of the largest size fits; the prompts together do not."""

STAGES = {"pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Engines whose layers have different weights."""
    return make_saved_fleet(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def uncached(saved: Fleet) -> Iterator[Engine]:
    """Two stages without a connector, and without vLLM's own prefix cache."""
    with engines(saved.engine(None, caching=False, is_split=True, options=STAGES)) as (engine,):
        yield engine


def test_first(saved: Fleet, uncached: Engine) -> None:
    prompts = [random_prompt(each, 20.5) for each in range(8)]
    expected = [answer.said for answer in uncached.ask(*prompts)]
    with running_node(["--shm-devices", "2", "--checksums", "all"]) as node:
        extra = {"host_blocks": 400, "verify_steps": 10}
        with engines(
            saved.engine(node.socket, DEVICE_BLOCKS, is_split=True, extra=extra, options=STAGES)
        ) as (first,):
            assert [first.ask(prompt)[0].said for prompt in prompts] == expected
            answers = [first.ask(prompt)[0] for prompt in prompts]
            assert [answer.said for answer in answers] == expected[:8]
            assert [answer.cached for answer in answers] == [20 * BLOCK_TOKENS] * len(prompts)
            assert [answer.said for answer in first.ask(*prompts)] == expected[:8]
