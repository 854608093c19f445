"""Two SGLang engines on one daemon, through everything that may befall them: each answer is that of SGLang alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from cachesvc_ctl.core.daemon_process import DaemonProcess

from tests.e2e.rig import FLAGS, short_folder
from tests.sglang.conftest import DEVICE_BLOCKS
from tests.sglang.rig import SglangFleet
from tests.vllm.rig import BLOCK_TOKENS, Engine, check_daemon, random_prompt, random_requests
from tests.vllm.scenarios import answer_alike, replaceable, send_and_begin

REQUESTS = 300
BATCH = 12


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """A daemon; at its end nothing is held, and its accounting adds up."""
    with short_folder() as folder:
        made = DaemonProcess(FLAGS, folder=str(folder))
        made.start()
        try:
            yield made
            check_daemon(made.socket)
        finally:
            assert made.stop() == 0


@pytest.fixture(scope="module")
def two(fleet: SglangFleet, daemon: DaemonProcess) -> Iterator[list[Engine]]:
    with replaceable([fleet.engine(daemon.socket, DEVICE_BLOCKS) for _ in range(2)]) as running:
        yield running


def test_an_answer_does_not_depend_on_what_else_is_in_its_batch(plain: Engine) -> None:
    """Nor on what was found of its prompt: so answers can be compared bit by bit."""
    prompts = [random_prompt(40 + each, each + 0.5, new=20) for each in range(8)]
    together, found, one_by_one = (
        plain.ask(*prompts),
        plain.ask(*prompts[::-1]),
        [plain.ask(each)[0] for each in prompts],
    )
    assert [answer.said for answer in found[::-1]] == [answer.said for answer in together]
    assert [answer.said for answer in one_by_one] == [answer.said for answer in together]
    assert [answer.cached for answer in one_by_one] == [each * BLOCK_TOKENS for each in range(8)]


def test_random_requests_are_answered_alike_by_two_engines_and_by_sglang_alone(
    two: list[Engine], plain: Engine
) -> None:
    cached, own = answer_alike(two, plain, random_requests(7, REQUESTS), BATCH)
    assert cached > 0.9 * own > 0  # two that compute one prefix at the same time do not find each other's


def test_what_one_after_another_finds_is_no_less_than_in_one_cache(two: list[Engine], plain: Engine) -> None:
    assert plain.reset()  # it may have some of these prompts' heads from other tests, and never more than a pool
    for each, request in enumerate(random_requests(9, 16)):
        answer, expected = two[each % 2].ask(request)[0], plain.ask(request)[0]
        assert answer.said == expected.said
        assert answer.cached >= expected.cached


def test_an_engine_killed_in_mid_request_leaves_what_it_sealed_to_the_next(
    fleet: SglangFleet, daemon: DaemonProcess, two: list[Engine], plain: Engine
) -> None:
    told, long = random_prompt(50, 6.5), random_prompt(51, 8.5, new=1500)
    expected, answer = plain.ask(told, random_prompt(51, 8.5)), two[0].ask(told)[0]
    assert answer.said == expected[0].said
    two[0].send(long)  # 1,500 tokens take it long enough
    assert two[1].ask(told)[0].cached == 6 * BLOCK_TOKENS
    two[0].kill()
    assert two[1].ask(told)[0].said == expected[0].said
    two[0] = fleet.engine(daemon.socket, DEVICE_BLOCKS)
    two[0].wait_ready()
    answer = two[0].ask(told)[0]
    assert (answer.said, answer.cached) == (expected[0].said, 6 * BLOCK_TOKENS)
    assert two[0].ask(random_prompt(51, 8.5))[0].said == expected[1].said


def test_requests_under_way_end_well_when_the_daemon_dies_and_what_comes_after_finds_the_next(
    daemon: DaemonProcess, two: list[Engine], plain: Engine
) -> None:
    under_way = [random_prompt(60, 2.5, new=60), random_prompt(61, 2.5, new=400)]
    later = random_prompt(62, 5.5)
    expected = plain.ask(*under_way, later)
    send_and_begin(daemon.socket, two, under_way[0])
    daemon.process.kill()
    daemon.process.wait()
    for engine in two:
        assert engine.collect()[0].said == expected[0].said
    assert two[1].ask(random_prompt(63, 1.5))[0].cached == 0  # in private pages, with no daemon at all
    for engine in two:
        engine.send(*under_way)
    daemon.start()
    for engine in two:
        assert [answer.said for answer in engine.collect()] == [answer.said for answer in expected[:2]]
    answers = [engine.ask(later)[0] for engine in two]
    assert [answer.said for answer in answers] == [expected[2].said] * 2
    assert [answer.cached for answer in answers] == [0, 5 * BLOCK_TOKENS]


def test_what_is_flushed_is_not_found_any_more_and_salts_separate(two: list[Engine], plain: Engine) -> None:
    """Last: an engine that was flushed shares with no other until there is a new version of the weights."""
    prompt = random_prompt(90, 4.5)
    salted = replace(prompt, salt="a tenant")
    expected = plain.ask(prompt)[0].said
    answers = [engine.ask(each)[0] for each in (prompt, salted) for engine in two]
    assert two[0].reset()
    answers += [two[0].ask(prompt)[0], two[0].ask(prompt)[0]]
    assert [answer.cached for answer in answers] == [0, 4 * BLOCK_TOKENS] * 3
    assert {answer.said for answer in answers} == {expected}
    two[0].plant_wrong_pages()
    for engine in two:
        assert engine.ask(prompt)[0].said != expected, "wrong pages would show"
