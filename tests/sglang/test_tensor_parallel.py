"""SGLang engines of two ranks, each of which has its slab: every answer is that of SGLang with two ranks alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.rig import Node, running_node, short_folder
from tests.sglang.rig import SglangFleet
from tests.vllm.rig import BLOCK_TOKENS, Engine, check_daemon, engines, make_saved_fleet, random_prompt, random_requests
from tests.vllm.scenarios import replaceable, send_and_begin

SMALL_BLOCKS = 72
REQUESTS = 12

TWO_DEVICES = ("--shm-devices", "2", "--checksums", "all", "--load-limit", "16MiB", "--lease-seconds", "600")
SLOW_AND_FAULTY = ("--shm-devices", "2", "--load-limit", "4MiB", "--lease-seconds", "600", "--fault-copies", "0.1")

only_long = pytest.mark.skipif(
    "CACHESVC_LONG" not in os.environ, reason="CACHESVC_LONG=1 runs it: an engine has two ranks"
)

EVICTED = [random_prompt(200 + each, 20.5) for each in range(5)]
"""Prompts that drive each other from the device."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, fleet: SglangFleet) -> SglangFleet:
    """Makes engines whose ranks have different weights."""
    folder = tmp_path_factory.mktemp("saved")
    make_saved_fleet(folder)
    return SglangFleet(folder, fleet.forker)


def of_two_ranks(saved: SglangFleet, socket: str | None, blocks: int = SMALL_BLOCKS, **wish: Any) -> Engine:
    """An engine of two ranks, which do not turn while they have no request."""
    options = {"tp_size": 2, "sleep_on_idle": True, **wish.pop("options", {})}
    return saved.engine(socket, blocks, options=options, variables={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, **wish)


def ranks_of(engine: Engine) -> list[int]:
    """Process ids of an engine's ranks, which are its first children."""
    found = Path(f"/proc/{engine.process.pid}/task").glob("*/children")
    return sorted(int(pid) for each in found for pid in each.read_text(encoding="utf-8").split())[:2]


@pytest.fixture(scope="module")
def alone(saved: SglangFleet) -> Iterator[Engine]:
    """Two ranks with SGLang's own radix cache."""
    with engines(of_two_ranks(saved, None, 256)) as (engine,):
        yield engine


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """A daemon with a device for each rank, where prompts drive each other to the host; at its end nothing is held."""
    with short_folder() as folder, running_node(TWO_DEVICES, folder=folder) as running:
        yield running
        check_daemon(running.daemon.socket)


@pytest.fixture(scope="module")
def two(saved: SglangFleet, node: Node) -> Iterator[list[Engine]]:
    """One that overlaps scheduling and computing, and looks for stray writes; and one that does neither."""
    checked = of_two_ranks(saved, node.socket, extra={"verify_steps": 10})
    plain = of_two_ranks(saved, node.socket, options={"disable_overlap_schedule": True})
    with replaceable([checked, plain]) as running:
        yield running


def test_an_engine_finds_on_both_ranks_what_the_one_before_it_has_left(
    saved: SglangFleet, node: Node, alone: Engine
) -> None:
    expected = [alone.ask(prompt)[0].said for prompt in EVICTED]
    assert len(set(expected)) == len(EVICTED)
    with engines(of_two_ranks(saved, node.socket)) as (first,):
        assert [first.ask(prompt)[0].said for prompt in EVICTED] == expected
    with engines(of_two_ranks(saved, node.socket)) as (second,):
        answers = [second.ask(prompt)[0] for prompt in EVICTED]
        second.plant_wrong_pages()
        assert second.ask(EVICTED[-1])[0].said != expected[-1], "wrong pages would show"
    assert [answer.said for answer in answers] == expected
    assert [answer.cached for answer in answers] == [20 * BLOCK_TOKENS] * len(EVICTED)
    assert node.counters()["hit_blocks_host"] >= 20


@only_long
def test_prefixes_are_found_by_another_engine_and_come_from_the_host_to_both_ranks(
    two: list[Engine], alone: Engine, node: Node
) -> None:
    expected = [alone.ask(prompt)[0].said for prompt in EVICTED]
    assert [two[0].ask(prompt)[0].said for prompt in EVICTED] == expected
    for engine in two:
        answers = [engine.ask(prompt)[0] for prompt in EVICTED]
        assert [answer.said for answer in answers] == expected
        assert [answer.cached for answer in answers] == [20 * BLOCK_TOKENS] * len(EVICTED)
    assert node.counters()["hit_blocks_host"] >= 20


@only_long
def test_what_one_after_another_finds_is_no_less_than_in_one_cache(two: list[Engine], alone: Engine) -> None:
    assert alone.reset()
    for each, request in enumerate(random_requests(9, 10)):
        answer, expected = two[each % 2].ask(request)[0], alone.ask(request)[0]
        assert answer.said == expected.said
        assert answer.cached >= expected.cached


@only_long
def test_random_requests_are_answered_alike(two: list[Engine], alone: Engine) -> None:
    """One at a time on each engine: SGLang's own answers with two ranks depend on what else is in a batch."""
    requests = random_requests(7, REQUESTS)
    for pair in zip(requests[::2], requests[1::2], strict=True):
        for engine, request in zip(two, pair, strict=True):
            engine.send(request)
        assert [engine.collect()[0].said for engine in two] == [alone.ask(request)[0].said for request in pair]


@only_long
def test_requests_are_retracted_alike(two: list[Engine], alone: Engine) -> None:
    requests = [random_prompt(300 + each, 2.5, new=70) for each in range(10)]
    expected = [answer.said for answer in alone.ask(*requests)]
    assert [answer.said for answer in two[0].ask(*requests)] == expected


@only_long
@pytest.mark.parametrize("rank", [1, 0])
def test_an_engine_one_of_whose_ranks_is_killed_ends_and_leaves_what_it_sealed(
    saved: SglangFleet, node: Node, two: list[Engine], alone: Engine, rank: int
) -> None:
    prompt, long = random_prompt(50 + rank, 6.5), random_prompt(60 + rank, 8.5, new=1500)
    expected = alone.ask(prompt)[0].said
    assert two[rank].ask(prompt)[0].said == expected
    two[rank].send(long)  # 1,500 tokens take it long enough
    os.kill(ranks_of(two[rank])[rank], signal.SIGKILL)
    assert two[rank].wait_dead() != 0
    answer = two[1 - rank].ask(prompt)[0]
    assert (answer.said, answer.cached) == (expected, 6 * BLOCK_TOKENS)
    two[rank] = of_two_ranks(saved, node.socket)
    two[rank].wait_ready()
    answer = two[rank].ask(prompt)[0]
    assert (answer.said, answer.cached) == (expected, 6 * BLOCK_TOKENS)


@only_long
def test_all_ranks_follow_to_the_next_daemon(two: list[Engine], alone: Engine, node: Node) -> None:
    under_way = [random_prompt(70, 2.5, new=40), random_prompt(71, 2.5, new=100)]
    later = random_prompt(72, 5.5)
    expected = [answer.said for answer in alone.ask(*under_way, later)]
    send_and_begin(node.socket, two, under_way[0])
    node.daemon.process.kill()
    node.daemon.process.wait()
    for engine in two:
        assert engine.collect()[0].said == expected[0]
        engine.send(*under_way)
    node.daemon.start()
    for engine in two:
        assert [answer.said for answer in engine.collect()] == expected[:2]
    answers = [engine.ask(later)[0] for engine in two]
    assert [answer.said for answer in answers] == [expected[2]] * 2
    assert [answer.cached for answer in answers] == [0, 5 * BLOCK_TOKENS]


@only_long
def test_what_did_not_come_to_one_rank_is_computed_by_all(saved: SglangFleet, alone: Engine, tmp_path: Path) -> None:
    log, options = tmp_path / "log", {"log_level": "warning"}
    expected = [alone.ask(prompt)[0].said for prompt in EVICTED]
    with (
        running_node(SLOW_AND_FAULTY) as faulty,
        engines(of_two_ranks(saved, faulty.socket, log=str(log), options=options)) as (engine,),
    ):
        for _ in range(12):
            assert [engine.ask(prompt)[0].said for prompt in EVICTED] == expected
            if log.exists() and "step_void" in log.read_text(encoding="utf-8"):
                break
        else:
            pytest.fail("no load has failed that a step was launched on")
