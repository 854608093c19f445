"""Engines of a pipeline of two stages, one of which has more layers: every answer is that of vLLM with the same stages
and without a cache."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvcache.v1 import admin_pb2

from tests.e2e.rig import Node, running_node, short_folder
from tests.long_cases import IS_LONG
from tests.vllm.rig import (
    BLOCK_TOKENS,
    MODEL,
    Engine,
    Fleet,
    check_daemon,
    engines,
    random_prompt,
    random_requests,
)
from tests.vllm.scenarios import answer_alike
from tests.vllm.weights import write_adapter, write_checkpoint

DEVICE_BLOCKS = 72
"""A request of the largest size fits; the prompts together do not."""

LAYERS = {**MODEL, "num_hidden_layers": 3}
STAGES = {"pipeline_parallel_size": 2, "max_num_batched_tokens": 256}
"""Two stages, with layers 0 and 1, and layer 2. A prompt has several chunks, which are under way at the same time."""

REQUESTS = 200 if IS_LONG else 60


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Engines whose layers have different weights."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "config.json").write_text(json.dumps(LAYERS), encoding="utf-8")
    write_checkpoint(folder, LAYERS, seed=1)
    return Fleet(folder, "auto")


@pytest.fixture(scope="module")
def uncached(saved: Fleet) -> Iterator[Engine]:
    """Two stages without a connector, and without vLLM's own prefix cache."""
    with engines(saved.engine(None, caching=False, is_split=True, options=STAGES)) as (engine,):
        yield engine


@pytest.fixture(scope="module")
def two_devices() -> Iterator[Node]:
    """A daemon with a device for each stage; at its end nothing is held, and sealed pages are what they were."""
    with running_node(["--shm-devices", "2", "--checksums", "all"]) as node:
        yield node
        check_daemon(node.socket)
        found = node.admin.Verify(admin_pb2.VerifyRequest(checksums=True))
        assert not found.checksums.mismatches


def two_stages(saved: Fleet, node: Node, **options: Any) -> Engine:
    """An engine that looks for stray writes."""
    extra = {"host_blocks": 400, "verify_steps": 10}
    options = {**STAGES, "disable_log_stats": False, **options}
    return saved.engine(node.socket, DEVICE_BLOCKS, is_split=True, extra=extra, options=options)


def test_stages_load_together_and_leave_what_they_sealed_when_one_is_killed(
    saved: Fleet, uncached: Engine, two_devices: Node
) -> None:
    prompts = [random_prompt(each, 20.5) for each in range(8)]
    long = random_prompt(50, 6.5, new=1500)
    expected = [answer.said for answer in uncached.ask(*prompts, random_prompt(50, 6.5))]
    assert len(set(expected)) == len(expected)

    first = two_stages(saved, two_devices)
    try:
        first.wait_ready()
        assert [first.ask(prompt)[0].said for prompt in prompts] == expected[:8]
        answers = [first.ask(prompt)[0] for prompt in prompts]
        assert [answer.said for answer in answers] == expected[:8]
        assert [answer.cached for answer in answers] == [20 * BLOCK_TOKENS] * len(prompts)
        assert two_devices.counters()["hit_blocks_host"] >= 20
        assert [answer.said for answer in first.ask(*prompts)] == expected[:8]  # more than fit at a time
        metrics = first.metrics()
        assert metrics["vllm:cachesvc_loads_total.came"] >= 1
        assert metrics["vllm:cachesvc_loads_total.failed"] == 0
        first.send(long)  # 1,500 tokens take it long enough
        os.kill(first.workers()[1], signal.SIGKILL)
        assert first.wait_dead() != 0
    finally:
        first.kill_if_running()

    with engines(two_stages(saved, two_devices)) as (second,):
        answers = [second.ask(prompt)[0] for prompt in (*prompts, random_prompt(50, 6.5))]
        assert [answer.said for answer in answers] == expected
        assert [answer.cached for answer in answers[:8]] == [20 * BLOCK_TOKENS] * len(prompts)


def test_random_requests_over_two_engines_one_of_which_is_killed(
    saved: Fleet, uncached: Engine, two_devices: Node
) -> None:
    one, other = two_stages(saved, two_devices), two_stages(saved, two_devices)
    with engines(one, other) as two:
        cached, _ = answer_alike(two, uncached, random_requests(7, REQUESTS), 12)
        assert cached > REQUESTS * BLOCK_TOKENS
        one.send(random_prompt(51, 8.5, new=1500))
        one.kill()
        last, expected = random_prompt(5, 20.5), uncached.ask(random_prompt(5, 20.5))[0].said
        assert [other.ask(last)[0].said for _ in range(2)] == [expected] * 2


@pytest.mark.parametrize("stage", range(2))
def test_a_wrong_page_of_either_stage_shows(saved: Fleet, uncached: Engine, stage: int) -> None:
    prompt = random_prompt(1, 20.5)
    expected = uncached.ask(prompt)[0].said
    with (
        running_node(["--shm-devices", "2"]) as node,
        engines(saved.engine(node.socket, DEVICE_BLOCKS, is_split=True, options=STAGES)) as (engine,),
    ):
        assert [engine.ask(prompt)[0].said for _ in range(2)] == [expected] * 2
        engine.plant_wrong_pages(stage)
        (answer,) = engine.ask(prompt)
        assert answer.cached == 20 * BLOCK_TOKENS
        assert answer.said != expected


def test_what_did_not_come_to_one_stage_is_computed_by_all(saved: Fleet, uncached: Engine) -> None:
    prompts = [random_prompt(each, 20.5) for each in range(8)]
    expected = [answer.said for answer in uncached.ask(*prompts)]
    with (
        running_node(["--shm-devices", "2", "--fault-copies", "0.05"]) as node,
        engines(
            saved.engine(
                node.socket,
                DEVICE_BLOCKS,
                is_split=True,
                extra={"host_blocks": 400},
                options={**STAGES, "disable_log_stats": False},
            )
        ) as (mine,),
    ):
        failed = 0.0
        while not failed:
            assert [mine.ask(prompt)[0].said for prompt in prompts] == expected
            failed = mine.metrics().get("vllm:cachesvc_loads_total.failed", 0)


def test_stages_of_two_ranks_share_with_engines_of_the_same_split_alone(saved: Fleet) -> None:
    prompts, ranks = [random_prompt(each, 20.5) for each in range(4)], {**STAGES, "tensor_parallel_size": 2}
    with engines(saved.engine(None, caching=False, is_split=True, options=ranks)) as (alone,):
        expected = [answer.said for answer in alone.ask(*prompts)]
    with running_node(["--shm-devices", "4", "--checksums", "all"]) as node:
        found = []
        for partition in ("2,1", "2,1", "1,2"):
            started = saved.engine(
                node.socket,
                DEVICE_BLOCKS,
                is_split=True,
                extra={"host_blocks": 100, "verify_steps": 10},
                options=ranks,
                variables={"VLLM_PP_LAYER_PARTITION": partition},
            )
            with engines(started) as (engine,):
                answers = [engine.ask(prompt)[0] for prompt in prompts]
                assert [answer.said for answer in answers] == expected
                found.append([answer.cached for answer in answers])
        assert found == [[0] * 4, [20 * BLOCK_TOKENS] * 4, [0] * 4]
        assert node.counters()["hit_blocks_host"] > 0
        check_daemon(node.socket)


def test_all_stages_follow_to_the_next_daemon(saved: Fleet, uncached: Engine) -> None:
    under_way, later = random_prompt(60, 2.5, new=400), random_prompt(62, 5.5)
    expected = [answer.said for answer in uncached.ask(under_way, later)]
    with (
        short_folder() as folder,
        running_node(["--shm-devices", "2"], folder=folder) as node,
        engines(saved.engine(node.socket, DEVICE_BLOCKS, is_split=True, options=STAGES)) as (engine,),
    ):
        assert engine.ask(later)[0].said == expected[1]
        engine.send(under_way)
        node.daemon.process.kill()
        node.daemon.process.wait()
        node.daemon.start()
        assert engine.collect()[0].said == expected[0]
        answers = [engine.ask(later)[0] for _ in range(2)]
        assert [answer.said for answer in answers] == [expected[1]] * 2
        assert answers[1].cached == 5 * BLOCK_TOKENS


def test_stages_agree_on_the_adapter_that_they_have_loaded(saved: Fleet, two_devices: Node, tmp_path: Path) -> None:
    write_adapter(tmp_path, LAYERS, seed=11)
    asked = random_prompt(1, 6.5)
    adapted = type(asked)(asked.tokens, asked.new, adapter=(1, str(tmp_path)))
    with engines(two_stages(saved, two_devices, enable_lora=True, max_lora_rank=8)) as (one,):
        answers = [one.ask(adapted)[0] for _ in range(2)]
        write_adapter(tmp_path, LAYERS, seed=12)
        one.load_adapter(1, str(tmp_path))
        newer = one.ask(adapted)[0]
    assert [answer.cached for answer in (*answers, newer)] == [0, 6 * BLOCK_TOKENS, 0]
    assert newer.said != answers[0].said == answers[1].said
