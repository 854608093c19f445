"""SGLang engines on a small pool: hits come from the host, requests are retracted, each answer is SGLang's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cachesvc_ctl.core.daemon_process import DaemonProcess

from tests.e2e.rig import FLAGS, short_folder
from tests.sglang.rig import SglangFleet
from tests.vllm.rig import BLOCK_TOKENS, Engine, check_daemon, engines, random_prompt, random_requests

SMALL_BLOCKS = 48
HASTY = {"schedule_conservativeness": 0.05}
"""SGLang admits as if answers were short, and retracts when they are not."""


@pytest.fixture(scope="module")
def small(fleet: SglangFleet) -> Iterator[list[Engine]]:
    """Two engines on one small pool: one that overlaps scheduling and computing, and one that does not."""
    with short_folder() as folder:
        daemon = DaemonProcess(FLAGS, folder=str(folder))
        daemon.start()
        try:
            with engines(
                fleet.engine(daemon.socket, SMALL_BLOCKS, options=HASTY),
                fleet.engine(daemon.socket, SMALL_BLOCKS, options={**HASTY, "disable_overlap_schedule": True}),
            ) as running:
                yield list(running)
            check_daemon(daemon.socket)
        finally:
            assert daemon.stop() == 0


def test_a_prefix_that_was_evicted_comes_from_the_host(small: list[Engine], plain: Engine) -> None:
    prompts = [random_prompt(200 + each, 12.5) for each in range(6)]
    expected = [plain.ask(prompt)[0].said for prompt in prompts]
    assert [small[0].ask(prompt)[0].said for prompt in prompts] == expected
    for engine in small:
        answers = [engine.ask(prompt)[0] for prompt in prompts]
        assert [answer.said for answer in answers] == expected
        assert [answer.cached for answer in answers] == [12 * BLOCK_TOKENS] * len(prompts)


def test_engines_that_want_more_than_there_is_retract_and_answer_alike(small: list[Engine], plain: Engine) -> None:
    requests = [random_prompt(300 + each, 2.5, new=150) for each in range(16)]
    expected = [answer.said for answer in plain.ask(*requests)]
    for engine, mine in zip(small, (requests[:8], requests[8:]), strict=True):
        engine.send(*mine)
    answers = [answer.said for engine in small for answer in engine.collect()]
    assert answers == expected


def test_random_requests_on_a_small_pool_are_answered_alike(small: list[Engine], plain: Engine) -> None:
    requests = random_requests(11, 48)
    expected = [answer.said for answer in plain.ask(*requests)]
    for engine, mine in zip(small, (requests[:24], requests[24:]), strict=True):
        engine.send(*mine)
    assert [answer.said for engine in small for answer in engine.collect()] == expected
