"""EAGLE drafters on real vLLM engines: they share as engines without one do, and draft as vLLM alone drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.rig import Node, running_node
from tests.vllm.drafter_weights import write_drafting_checkpoints
from tests.vllm.rig import BLOCK_TOKENS, MODEL, Engine, Fleet, engines, random_prompt, random_requests

REQUESTS, BATCH = 300, 12
DEVICE_BLOCKS = 160
PROMPTS = [random_prompt(each, 6.5, new=60) for each in range(4)]


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Fleet, dict[str, Any]]:
    """Engines of a model on disk, and the options by which they draft."""
    target, drafter = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    write_drafting_checkpoints(target, drafter, MODEL)
    speculative = {"method": "eagle", "model": str(drafter), "num_speculative_tokens": 3}
    return Fleet(target, "auto"), {"speculative_config": speculative, "disable_log_stats": False}


@pytest.fixture(scope="module")
def alone(drafting: tuple[Fleet, dict[str, Any]]) -> Iterator[Engine]:
    """vLLM without a connector and without its own prefix cache, drafting. It has answered ``PROMPTS``."""
    fleet, options = drafting
    with engines(fleet.engine(None, caching=False, options=options)) as (engine,):
        yield engine


@pytest.fixture(scope="module")
def expected(alone: Engine) -> tuple[list[object], tuple[float, float]]:
    """Its answers to ``PROMPTS``, and its drafts."""
    return [alone.ask(prompt)[0].said for prompt in PROMPTS], drafted(alone)


def drafted(engine: Engine) -> tuple[float, float]:
    """Draft tokens that were proposed, and those that were accepted."""
    metrics = engine.metrics()
    found = [metrics[f"vllm:spec_decode_num_{each}_tokens_total"] for each in ("draft", "accepted")]
    return found[0], found[1]


@pytest.mark.parametrize(("draft_blocks", "lost"), [("lookahead", 0), ("drop", 1)])
def test_another_process_finds_the_blocks_and_drafts_are_accepted_as_without_it(
    drafting: tuple[Fleet, dict[str, Any]],
    expected: tuple[list[object], tuple[float, float]],
    draft_blocks: str,
    lost: int,
) -> None:
    fleet, options = drafting
    said, (proposed, accepted) = expected
    assert accepted > proposed / 4
    with running_node() as node:
        for found in (0, 6 - lost):
            mine = fleet.engine(node.socket, options=options, extra={"draft_blocks": draft_blocks})
            with engines(mine):
                answers = [mine.ask(prompt)[0] for prompt in PROMPTS]
                assert [answer.said for answer in answers] == said
                assert [answer.cached for answer in answers] == [found * BLOCK_TOKENS] * 4
                assert drafted(mine) == (proposed, accepted)
        assert node.problems() == []


def test_engines_share_only_with_those_that_draft_alike(drafting: tuple[Fleet, dict[str, Any]]) -> None:
    fleet, options = drafting
    prompt = random_prompt(1, 6.5)
    with running_node() as node:
        for extra, wished in (({}, options), ({"draft_blocks": "drop"}, options), ({}, {})):
            with engines(fleet.engine(node.socket, extra=extra, options=wished)) as (mine,):
                assert mine.ask(prompt)[0].cached == 0


def test_random_requests_over_two_drafting_engines_one_of_which_is_killed(
    drafting: tuple[Fleet, dict[str, Any]], alone: Engine
) -> None:
    fleet, options = drafting
    requests = random_requests(7, REQUESTS)

    def engine(node: Node) -> Engine:
        return fleet.engine(node.socket, DEVICE_BLOCKS, options=options)

    with running_node() as node:
        two = [engine(node).wait_ready(), engine(node).wait_ready()]
        try:
            cached = 0
            for first in range(0, REQUESTS, 2 * BATCH):
                both = requests[first : first + 2 * BATCH]
                if first == 4 * BATCH:
                    two[0].send(random_prompt(99, 4.5, new=400))
                    two[0].kill()
                    two[0] = engine(node).wait_ready()
                for each, mine in zip(two, (both[:BATCH], both[BATCH:]), strict=True):
                    each.send(*mine)
                answers = [answer for each in two for answer in each.collect()]
                assert [answer.tokens for answer in answers] == [answer.tokens for answer in alone.ask(*both)]
                cached += sum(answer.cached for answer in answers)
            assert cached > REQUESTS * BLOCK_TOKENS
            assert [each.stop() for each in two] == [0, 0]
        finally:
            for each in two:
                each.kill_if_running()
        assert node.problems() == []


def test_a_drafter_that_is_wider_than_its_target_shares_too(tmp_path: Path) -> None:
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    for folder, config in ((target, MODEL), (drafter, {**MODEL, "num_hidden_layers": 1, "num_key_value_heads": 4})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    options = {"speculative_config": {"method": "eagle", "model": str(drafter), "num_speculative_tokens": 2}}
    said: list[Any] = []
    with running_node() as node:
        for found in (0, 6):
            with engines(Fleet(target).engine(node.socket, options=options)) as (mine,):
                answers = [mine.ask(prompt)[0] for prompt in PROMPTS]
                assert [answer.cached for answer in answers] == [found * BLOCK_TOKENS] * 4
                if found:
                    mine.plant_wrong_pages()
                    assert mine.ask(PROMPTS[0])[0].said != said[0][0], "wrong pages would show"
            said.append([answer.said for answer in answers])
        assert said[0] == said[1]
