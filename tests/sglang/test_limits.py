"""An SGLang engine with pages of any size that is served, one that is refused, and one that was frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.rig import running_node
from tests.sglang.rig import SglangFleet
from tests.vllm.rig import Engine, check_daemon, engines, random_prompt
from tests.vllm.scenarios import DECODING, stop_until_lost

DEVICE_BLOCKS = 72


@pytest.mark.parametrize("page_tokens", [16, 128])
def test_pages_of_other_sizes_are_served_too(fleet: SglangFleet, plain: Engine, page_tokens: int) -> None:
    prompt = random_prompt(400, 12.5)
    expected = plain.ask(prompt)[0].said
    with running_node() as node:
        with engines(fleet.engine(node.socket, options={"page_size": page_tokens})) as (engine,):
            answers = [engine.ask(prompt)[0] for _ in range(2)]
        assert [answer.said for answer in answers] == [expected] * 2
        assert answers[1].cached == (len(prompt.tokens) - 1) // page_tokens * page_tokens
        check_daemon(node.socket)


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"options": {"page_size": 1}}, "--page-size is 1"),
        ({"extra": {"stock": 1}}, "CACHESVC_SGLANG has stock; what can be set is socket"),
        ({}, "no cachesvcd answers at"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    fleet: SglangFleet, tmp_path: Path, wish: dict[str, Any], reason: str
) -> None:
    log = tmp_path / "log"
    engine = fleet.engine(str(tmp_path / "none.sock"), log=str(log), **wish)
    try:
        engine.wait_dead()
        assert reason in log.read_text(encoding="utf-8")
    finally:
        engine.kill_if_running()


def test_an_engine_that_was_stopped_says_nothing_of_what_others_wrote(fleet: SglangFleet, plain: Engine) -> None:
    expected = [answer.said for answer in plain.ask(*DECODING)]
    with running_node(["--lease-seconds", "2"]) as node:
        frozen, other = (fleet.engine(node.socket, DEVICE_BLOCKS) for _ in range(2))
        try:
            for engine in (frozen, other):
                engine.wait_ready()
            stop_until_lost(node, frozen, other, expected)
        finally:
            for engine in (frozen, other):
                engine.kill_if_running()
        check_daemon(node.socket)
