"""SGLang engines of a model with sliding windows: each answer is that of SGLang alone, with its own cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.rig import running_node
from tests.sglang.windows import WindowsFleet
from tests.vllm.rig import BLOCK_TOKENS, Engine, check_daemon, engines, random_prompt, random_requests
from tests.vllm.scenarios import answer_alike

DEVICE_BLOCKS = 160
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


def test_random_requests_are_answered_alike_by_two_engines_and_by_sglang_alone(
    windows: WindowsFleet, alone: Engine
) -> None:
    with running_node() as node:
        with engines(*(windows.engine(node.socket, DEVICE_BLOCKS) for _ in range(2))) as two:
            cached, own = answer_alike(two, alone, random_requests(21, 96), 12)
        check_daemon(node.socket)
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
