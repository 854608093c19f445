"""SGLang engines of a model with sliding windows: each answer is that of SGLang alone, with its own cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.rig import running_node
from tests.sglang.windows import WindowsFleet
from tests.vllm.rig import BLOCK_TOKENS, Engine, check_daemon, engines, random_prompt, random_requests
from tests.vllm.scenarios import answer_alike, replaceable, send_and_begin

DEVICE_BLOCKS = 160
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
LARGE_BLOCKS = 320
"""Room for all blocks of the random requests."""
LONG = [random_prompt(500 + each, 12.5, new=8) for each in range(5)]
"""Prompts of several windows and chunks, which drive each other from a small pool."""


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> WindowsFleet:
    return WindowsFleet(tmp_path_factory.mktemp("windows"))


@pytest.fixture(scope="module")
def alone(windows: WindowsFleet) -> Iterator[Engine]:
    """SGLang with its own radix cache."""
    with engines(windows.engine(None, DEVICE_BLOCKS)) as (engine,):
        yield engine


def test_windows_are_found_by_the_next_engine_and_wrong_ones_would_show(windows: WindowsFleet, alone: Engine) -> None:
    """Each hit ends behind several windows, and as far as SGLang's own."""
    expected = [alone.ask(each)[0] for each in LONG]
    again = [alone.ask(each)[0] for each in LONG]
    with running_node() as node:
        with engines(windows.engine(node.socket, DEVICE_BLOCKS)) as (one,):
            assert [one.ask(each)[0] for each in LONG] == expected
        with engines(windows.engine(node.socket, DEVICE_BLOCKS)) as (other,):
            assert [other.ask(each)[0] for each in LONG] == again
            assert [each.cached for each in again] == [12 * BLOCK_TOKENS] * len(LONG)
            other.plant_wrong_pages()
            assert other.ask(LONG[0])[0].said != expected[0].said, "wrong windows would show"
        check_daemon(node.socket)


def test_random_requests_are_answered_alike_by_two_engines_and_by_sglang_alone(windows: WindowsFleet) -> None:
    with (
        running_node() as node,
        engines(*(windows.engine(node.socket, LARGE_BLOCKS, window_part=1.0) for _ in range(2))) as two,
        engines(windows.engine(None, LARGE_BLOCKS, window_part=1.0)) as (plain,),
    ):
        cached, own = answer_alike(two, plain, random_requests(21, 96), 12)
    assert cached > 0.9 * own > 0


def test_what_left_a_small_pool_of_windows_comes_from_the_host(windows: WindowsFleet, alone: Engine) -> None:
    """A pool of 20 windows' blocks, of which a prompt has 13: chunks wait for windows to slide."""
    expected = [alone.ask(each)[0].said for each in LONG]
    with running_node() as node:
        with engines(*(windows.engine(node.socket, 40, window_part=0.5) for _ in range(2))) as (one, other):
            assert [one.ask(each)[0].said for each in LONG] == expected
            answers = [other.ask(each)[0] for each in LONG]
            assert [each.said for each in answers] == expected
            assert [each.cached for each in answers] == [12 * BLOCK_TOKENS] * len(LONG)
            assert [each.said for each in other.ask(*LONG)] == expected
        check_daemon(node.socket)


@pytest.mark.parametrize("is_overlapping", [True, False])
def test_engines_that_want_more_than_there_is_retract_and_answer_alike(
    windows: WindowsFleet, alone: Engine, *, is_overlapping: bool
) -> None:
    """Prompts and answers of two engines on a pool of 24 blocks of windows, of which each of the 16 wants 3."""
    requests = [random_prompt(300 + each, 2.5, new=120) for each in range(16)]
    expected = [answer.said for answer in alone.ask(*requests)]
    options: dict[str, Any] = {"schedule_conservativeness": 0.05, "disable_overlap_schedule": not is_overlapping}
    with running_node() as node:
        with engines(*(windows.engine(node.socket, 48, **options) for _ in range(2))) as two:
            for engine, mine in zip(two, (requests[:8], requests[8:]), strict=True):
                engine.send(*mine)
            assert [answer.said for engine in two for answer in engine.collect()] == expected
            mixed = [*random_requests(31, 12), *LONG]
            for engine in two:
                engine.send(*mixed)
            answers = [answer.said for answer in alone.ask(*mixed)]
            assert [[answer.said for answer in engine.collect()] for engine in two] == [answers] * 2
        check_daemon(node.socket)


def test_an_engine_killed_in_mid_request_leaves_its_windows_to_the_next(windows: WindowsFleet, alone: Engine) -> None:
    prompt, long = random_prompt(50, 6.5), random_prompt(51, 8.5, new=1500)
    expected = alone.ask(prompt, random_prompt(51, 8.5))
    with running_node() as node:
        with replaceable([windows.engine(node.socket, DEVICE_BLOCKS) for _ in range(2)]) as two:
            assert two[0].ask(prompt)[0].said == expected[0].said
            two[0].send(long)  # 1,500 tokens take it long enough
            assert two[1].ask(prompt)[0].cached == 6 * BLOCK_TOKENS
            two[0].kill()
            two[0] = windows.engine(node.socket, DEVICE_BLOCKS)
            two[0].wait_ready()
            for engine in two:
                answer = engine.ask(prompt)[0]
                assert (answer.said, answer.cached) == (expected[0].said, 6 * BLOCK_TOKENS)
            assert two[0].ask(random_prompt(51, 8.5))[0].said == expected[1].said
        check_daemon(node.socket)


def test_requests_under_way_end_well_when_the_daemon_dies_and_what_comes_after_finds_the_next(
    windows: WindowsFleet, alone: Engine
) -> None:
    """Both slabs of the next daemon are mapped where the first one's were."""
    under_way = [random_prompt(60, 2.5, new=60), random_prompt(61, 2.5, new=200)]
    later = random_prompt(62, 5.5)
    expected = [answer.said for answer in alone.ask(*under_way, later)]
    with running_node() as node:
        with replaceable([windows.engine(node.socket, DEVICE_BLOCKS) for _ in range(2)]) as two:
            send_and_begin(node.socket, two, under_way[0])
            node.daemon.process.kill()
            node.daemon.process.wait()
            for engine in two:
                assert engine.collect()[0].said == expected[0]
            assert two[1].ask(random_prompt(63, 1.5))[0].cached == 0  # in private pages of both pools
            for engine in two:
                engine.send(*under_way)
            node.daemon.start()
            for engine in two:
                assert [answer.said for answer in engine.collect()] == expected[:2]
            answers = [engine.ask(later)[0] for engine in two]
            assert [answer.said for answer in answers] == [expected[2]] * 2
            assert [answer.cached for answer in answers] == [0, 5 * BLOCK_TOKENS]
        check_daemon(node.socket)


def test_two_ranks_have_the_same_windows(windows: WindowsFleet) -> None:
    """Followers are sent both tables, and free nothing by themselves."""
    options = {"tp_size": 2, "sleep_on_idle": True}
    requests = [*LONG, *random_requests(41, 6)]
    with engines(windows.engine(None, DEVICE_BLOCKS, variables=TWO_RANKS, **options)) as (plain,):
        expected = [plain.ask(each)[0].said for each in requests]
    with running_node(("--shm-devices", "2", "--lease-seconds", "600")) as node:
        for cached in (0, 12 * BLOCK_TOKENS):
            with engines(windows.engine(node.socket, 48, variables=TWO_RANKS, **options)) as (engine,):
                answers = [engine.ask(each)[0] for each in requests]
                assert [each.said for each in answers] == expected
                assert answers[0].cached == cached
        check_daemon(node.socket)


def test_two_prompts_in_chunks_of_which_the_pools_hold_one_are_both_answered(
    windows: WindowsFleet, alone: Engine
) -> None:
    """On each of two engines, which have one pool."""
    larger = [random_prompt(600 + each, 30.5) for each in range(4)]
    expected = [alone.ask(each)[0].said for each in larger]
    with running_node() as node:
        with engines(*(windows.engine(node.socket, 40) for _ in range(2))) as two:
            for engine, mine in zip(two, (larger[:2], larger[2:]), strict=True):
                engine.send(*mine)
            assert [answer.said for engine in two for answer in engine.collect()] == expected
        check_daemon(node.socket)
