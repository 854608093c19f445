"""Engines of two ranks, each of which has its slab: every answer is that of vLLM with two ranks and without a cache."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.rig import Node, running_node, short_folder, wait_until
from tests.vllm.rig import BLOCK_TOKENS, MODEL, Engine, Fleet, engines, make_saved_fleet, random_prompt
from tests.vllm.weights import write_adapter

DEVICE_BLOCKS = 72
"""A request of the largest size fits; the prompts together do not."""

RANKS = {"tensor_parallel_size": 2}

LEASE = re.compile("lease_(opened|joined)")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Engines whose ranks have different weights."""
    return make_saved_fleet(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def uncached(saved: Fleet) -> Iterator[Engine]:
    """Two ranks without a connector, and without vLLM's own prefix cache."""
    with engines(saved.engine(None, caching=False, is_split=True, options=RANKS)) as (engine,):
        yield engine


@pytest.fixture(scope="module")
def two_devices() -> Iterator[Node]:
    """A daemon with a device for each rank."""
    with running_node(["--shm-devices", "2", "--checksums", "all"]) as node:
        yield node


def two_ranks(saved: Fleet, node: Node) -> Engine:
    """An engine that looks for stray writes."""
    extra = {"host_blocks": 400, "verify_steps": 10}
    options = {**RANKS, "disable_log_stats": False}
    return saved.engine(node.socket, DEVICE_BLOCKS, is_split=True, extra=extra, options=options)


def test_ranks_load_together_and_leave_what_they_sealed_when_one_is_killed(
    saved: Fleet, uncached: Engine, two_devices: Node
) -> None:
    prompts = [random_prompt(each, 20.5) for each in range(8)]
    long = random_prompt(50, 6.5, new=1500)
    expected = [answer.said for answer in uncached.ask(*prompts, random_prompt(50, 6.5))]
    assert len(set(expected)) == len(expected)

    first = two_ranks(saved, two_devices)
    try:
        first.wait_ready()
        assert [first.ask(prompt)[0].said for prompt in prompts] == expected[:8]
        answers = [first.ask(prompt)[0] for prompt in prompts]
        assert [answer.said for answer in answers] == expected[:8]
        assert [answer.cached for answer in answers] == [20 * BLOCK_TOKENS] * len(prompts)
        assert two_devices.counters()["hit_blocks_host"] >= 20
        assert [answer.said for answer in first.ask(*prompts)] == expected[:8]  # more than fit at a time
        metrics = first.metrics()
        loads, hits = metrics["vllm:cachesvc_loads_total.came"], metrics["vllm:cachesvc_hit_tokens_total.host"]
        assert 1 <= loads <= hits // BLOCK_TOKENS
        assert metrics["vllm:cachesvc_loads_total.failed"] == 0
        first.send(long)  # 1,500 tokens take it long enough
        os.kill(first.workers()[1], signal.SIGKILL)
        assert first.wait_dead() != 0
    finally:
        first.kill_if_running()

    with engines(two_ranks(saved, two_devices)) as (second,):
        answers = [second.ask(prompt)[0] for prompt in (*prompts, random_prompt(50, 6.5))]
        assert [answer.said for answer in answers] == expected
        assert [answer.cached for answer in answers[:8]] == [20 * BLOCK_TOKENS] * len(prompts)


def test_what_did_not_come_to_one_rank_is_computed_by_all(saved: Fleet, uncached: Engine) -> None:
    prompts = [random_prompt(each, 20.5) for each in range(8)]
    expected = [answer.said for answer in uncached.ask(*prompts)]
    with running_node(["--shm-devices", "2", "--fault-copies", "0.05"]) as node:
        extra, options = {"host_blocks": 400}, {**RANKS, "disable_log_stats": False}
        with engines(saved.engine(node.socket, DEVICE_BLOCKS, is_split=True, extra=extra, options=options)) as (mine,):
            failed = 0.0
            while not failed:
                assert [mine.ask(prompt)[0].said for prompt in prompts] == expected
                failed = mine.metrics().get("vllm:cachesvc_loads_total.failed", 0)


def test_ranks_agree_on_the_adapter_that_they_have_loaded(saved: Fleet, two_devices: Node, tmp_path: Path) -> None:
    write_adapter(tmp_path, MODEL, seed=11)
    options = {**RANKS, "enable_lora": True, "max_lora_rank": 8}
    asked = replace(random_prompt(1, 6.5), adapter=(1, str(tmp_path)))

    def engine() -> Engine:
        return saved.engine(two_devices.socket, DEVICE_BLOCKS, is_split=True, options=options)

    with engines(engine()) as (one,):
        answers = [one.ask(asked)[0] for _ in range(2)]
        write_adapter(tmp_path, MODEL, seed=12)
        one.load_adapter(1, str(tmp_path))
        newer = one.ask(asked)[0]
    assert [answer.cached for answer in (*answers, newer)] == [0, 6 * BLOCK_TOKENS, 0]
    assert newer.said != answers[0].said == answers[1].said
    with engines(engine()) as (two,):
        (answer,) = two.ask(asked)
        assert (answer.said, answer.cached) == (newer.said, 6 * BLOCK_TOKENS)


def test_another_number_of_ranks_shares_nothing(saved: Fleet, two_devices: Node) -> None:
    prompt = random_prompt(3, 20.5)
    with engines(saved.engine(two_devices.socket, DEVICE_BLOCKS, extra={"host_blocks": 100})) as (alone,):
        assert [alone.ask(prompt)[0].cached for _ in range(2)] == [0, 20 * BLOCK_TOKENS]


def test_all_ranks_follow_to_the_next_daemon(saved: Fleet, uncached: Engine) -> None:
    under_way, later = random_prompt(60, 2.5, new=400), random_prompt(62, 5.5)
    expected = [answer.said for answer in uncached.ask(under_way, later)]
    with (
        short_folder() as folder,
        running_node(["--shm-devices", "2"], folder=folder) as node,
        engines(saved.engine(node.socket, DEVICE_BLOCKS, is_split=True, options=RANKS)) as (engine,),
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


def test_ranks_follow_daemons_that_go_again_as_soon_as_they_were_found(saved: Fleet, uncached: Engine) -> None:
    under_way = random_prompt(60, 2.5, new=400)
    expected = uncached.ask(under_way)[0].said
    with (
        short_folder() as folder,
        running_node(["--shm-devices", "2"], folder=folder) as node,
        engines(saved.engine(node.socket, DEVICE_BLOCKS, is_split=True, options=RANKS)) as (engine,),
    ):
        engine.send(under_way)
        for processes in (1, 1, 2, 2, 3, 3):  # of three that look for it
            node.daemon.kill()
            said = len(node.log())
            node.daemon.start()
            wait_until(lambda: len(LEASE.findall(node.log(), said)) >= processes, "that many have found it")  # noqa: B023
        assert engine.collect()[0].said == expected
