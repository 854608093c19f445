"""Models with windows and with recurrent states, their groups in one pool: tokens, log-probabilities and cached tokens
are those of vLLM alone with its own prefix cache."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from kvcache.v1 import admin_pb2

from tests.e2e.rig import running_node, short_folder
from tests.long_cases import long
from tests.vllm.hybrid_models import GEMMA_3, GEMMA_4, GPT_OSS, LLAMA, MISTRAL, QWEN_3_NEXT, HybridModel
from tests.vllm.rig import BLOCK_TOKENS, Engine, Fleet, Prompt, check_daemon, engines, random_prompt
from tests.vllm.scenarios import answer_alike
from tests.vllm.weights import write_checkpoint

MODELS = [
    pytest.param(GEMMA_4, id="gemma-4"),
    pytest.param(GPT_OSS, id="gpt-oss"),
    pytest.param(QWEN_3_NEXT, id="qwen3-next"),
    pytest.param(MISTRAL, id="mistral-v0.1"),
]
KINDS = [pytest.param(GEMMA_3, id="gemma-3"), *MODELS[2:]]
"""A model with windows, one with states, and one with windows alone."""
RANDOM_REQUESTS = 300
BATCH = 6
LEAST_SHARE = 0.98
"""Part of the tokens that one engine alone finds, which computes both batches together."""


def prompts_of(model: HybridModel, count: int, blocks: int | None = None, new: int = 40) -> list[Prompt]:
    """Prompts of some whole blocks and a half."""
    whole = blocks or (10 if model.block_tokens == BLOCK_TOKENS else 2)
    return [random_prompt(each, (whole + 0.5) * model.block_tokens / BLOCK_TOKENS, new=new) for each in range(count)]


def mixed_requests(model: HybridModel, seed: int, count: int) -> list[Prompt]:
    """Requests most of which begin as others do and go on otherwise."""
    rng = random.Random(seed)
    longest = 10 * BLOCK_TOKENS if model.block_tokens == BLOCK_TOKENS else 3 * model.block_tokens
    heads = [random_prompt(each, longest / BLOCK_TOKENS).tokens for each in range(3)]
    return [
        random_prompt(
            1000 + each, rng.random() * 3 + 0.1, rng.randrange(1, 40), rng.choice(heads)[: rng.randrange(longest)]
        )
        for each in range(count)
    ]


def engine_of(fleet: Fleet, model: HybridModel, socket: str | None, blocks: int = 0, **extra: int) -> Engine:
    """An engine that starts."""
    return fleet.engine(socket, blocks or model.blocks, extra=extra, options=dict(model.options))


def ask_each(engine: Engine, prompts: Sequence[Prompt]) -> tuple[list[object], list[int]]:
    """Answers one after another, and the cached tokens of each."""
    answers = [engine.ask(prompt)[0] for prompt in prompts]
    return [answer.said for answer in answers], [answer.cached for answer in answers]


@pytest.mark.parametrize(
    ("model", "policy"),
    [pytest.param(GPT_OSS, "write_through", id="gpt-oss"), pytest.param(QWEN_3_NEXT, "write_back", id="qwen3-next")],
)
@pytest.mark.parametrize("groups", [3, long(12)])
def test_a_full_host_serves_each_group_of_conversations(
    model: HybridModel, policy: str, groups: int, tmp_path: Path
) -> None:
    """The host holds one group and some of the next: what is new has to come there whole, and what is old has to go."""
    fleet, turns, members = model.fleet(tmp_path), 3, 5
    shares: list[float] = []
    with running_node(["--write-policy", policy]) as node:
        small = model.least_blocks
        with engines(engine_of(fleet, model, node.socket, small, host_blocks=3 * small)) as (engine,):
            (served,) = node.admin.ListModels(admin_pb2.ListModelsRequest()).models
            has_states = any(group.state for group in served.layout.groups)
            new = served.layout.block_tokens * (1 if has_states else 10)
            for group in range(groups):
                hits = known = 0
                for turn, member in product(range(turns), range(members)):
                    blocks = ((turn + 1) * new + BLOCK_TOKENS / 2) / BLOCK_TOKENS
                    answer = engine.ask(random_prompt(100 * group + member, blocks, new=1))[0]
                    known += turn * new
                    hits += min(answer.cached, turn * new)
                shares.append(hits / known)
            assert node.counters()["hit_blocks_host"] > 0
        check_daemon(node.socket)  # an idle engine that lives has its stock still: a row of pages or two
    print(f"hits of known tokens by group of conversations: {shares}")
    assert min(shares) >= 0.95, shares


@pytest.mark.parametrize("model", MODELS)
def test_what_one_engine_computed_is_in_place_for_the_next(model: HybridModel, tmp_path: Path) -> None:
    fleet, prompts = model.fleet(tmp_path), prompts_of(model, 3)
    longer = [replace(each, tokens=each.tokens + random_prompt(99, 1.2).tokens) for each in prompts]
    with engines(engine_of(fleet, model, None)) as (alone,):
        expected = [ask_each(alone, each) for each in (prompts, prompts, longer)]
    with running_node() as node:
        with engines(engine_of(fleet, model, node.socket)) as (one,):
            assert [ask_each(one, each) for each in (prompts, prompts)] == expected[:2]
        with engines(engine_of(fleet, model, node.socket)) as (two,):
            assert ask_each(two, prompts) == expected[1], "from its first request on"
            assert ask_each(two, longer) == expected[2]
            two.plant_wrong_pages()
            assert ask_each(two, longer[:1])[0] != expected[2][0][:1], "wrong pages would show"


@pytest.mark.parametrize("model", KINDS)
def test_two_engines_at_once_on_a_pool_that_is_too_small_for_both(model: HybridModel, tmp_path: Path) -> None:
    """Requests are preempted, and what is coldest goes to the host and comes back; one engine is killed in mid-request,
    and the other one goes on."""
    fleet, requests = model.repeating_fleet(tmp_path), mixed_requests(model, 7, 4 * BATCH)
    with engines(engine_of(fleet, model, None)) as (alone,):
        expected = [answer.said for answer in alone.ask(*requests)]
    small = 2 * model.blocks // 3
    with short_folder() as folder, running_node(["--checksums", "all"], folder=folder) as node:
        with engines(*(engine_of(fleet, model, node.socket, small, host_blocks=400) for _ in range(2))) as two:
            said: list[object] = []
            for first in range(0, len(requests), 2 * BATCH):
                both = requests[first : first + 2 * BATCH]
                two[0].send(*both[:BATCH])
                two[1].send(*both[BATCH:])
                said += [answer.said for engine in two for answer in engine.collect()]
            assert said == expected
            two[0].send(*(replace(each, new=400) for each in requests[:BATCH]))
            two[1].send(*requests[:BATCH])
            two[0].process.send_signal(signal.SIGKILL)
            two[0].wait_dead()
            assert [answer.said for answer in two[1].collect()] == expected[:BATCH]
        assert node.counters().get("hit_blocks_device", 0) > 0


@pytest.mark.parametrize("model", KINDS)
def test_a_prompt_that_left_the_device_is_loaded_in_all_groups(model: HybridModel, tmp_path: Path) -> None:
    """States without a later request are what a full pool drops first: written through, they are on the host."""
    prompts = prompts_of(model, 12, new=4)
    fleet, small = model.fleet(tmp_path), model.least_blocks
    with engines(engine_of(fleet, model, None)) as (alone,):
        expected, _ = ask_each(alone, prompts)
    with (
        running_node(["--checksums", "all", "--write-policy", "write_through"]) as node,
        engines(engine_of(fleet, model, node.socket, small, host_blocks=800, verify_steps=10)) as (mine,),
    ):
        assert ask_each(mine, prompts)[0] == expected
        said, cached = ask_each(mine, prompts)
        assert said == expected
        (served,) = node.admin.ListModels(admin_pb2.ListModelsRequest()).models
        tokens = served.layout.block_tokens  # where there are states, they depend on the kernels of the processor
        whole = (len(prompts[0].tokens) - 1) // tokens * tokens
        assert cached == [whole] * len(prompts)
        assert node.counters()["hit_blocks_host"] > 0
        assert ask_each(mine, prompts) == (expected, cached), "also where a part of a hit is in place still"
        assert [answer.said for answer in mine.ask(*prompts)] == expected


@pytest.mark.parametrize("model", [pytest.param(LLAMA, id="llama"), *KINDS[:1], *MODELS])
@pytest.mark.parametrize("count", [long(RANDOM_REQUESTS)])
def test_random_requests_find_and_say_what_they_do_alone(model: HybridModel, count: int, tmp_path: Path) -> None:
    """One after another each finds at least as many tokens as alone: vLLM keeps blocks of windows at some positions
    only, and whatever is in the daemon's pool is found. At once, two engines and one alone have other batches, and
    a request finds what an earlier batch computed. Then one of the two is killed in the midst of its requests."""
    fleet, requests, blocks = model.repeating_fleet(tmp_path), mixed_requests(model, 11, count), 4 * model.blocks
    requests = [replace(each, new=1 + each.new // 4) for each in requests]
    one_by_one, at_once = requests[: count // 6], requests[count // 6 :]
    with running_node(["--checksums", "all"]) as node:
        started = [engine_of(fleet, model, None, blocks)]
        started += [engine_of(fleet, model, node.socket, blocks, verify_steps=50) for _ in range(2)]
        with engines(*started) as (alone, *two):
            (said, found), (expected, hits) = (ask_each(each, one_by_one) for each in (two[0], alone))
            assert said == expected
            assert all(mine >= own for mine, own in zip(found, hits, strict=True)), (found, hits)
            cached, own = answer_alike(two, alone, at_once, BATCH)
            assert cached >= own * LEAST_SHARE
            last = at_once[-2 * BATCH :]
            two[0].send(*(replace(each, new=200) for each in last[:BATCH]))
            two[1].send(*last[BATCH:])
            two[0].kill()
            assert [each.said for each in two[1].collect()] == [each.said for each in alone.ask(*last[BATCH:])]
        check_daemon(node.socket)
        with engines(engine_of(fleet, model, node.socket, blocks)) as (later,):
            said_before, found = ask_each(later, one_by_one[-2:])
            assert said_before == said[-2:]
            assert any(found)
            later.plant_wrong_pages()
            assert ask_each(later, one_by_one[-2:])[0] != said_before, "wrong pages would show"


@pytest.mark.parametrize(("of", "count"), [long("tensor", 6), long("pipeline", 10)])
def test_ranks_load_all_groups_together(of: str, count: int, tmp_path: Path) -> None:
    """Ranks have different weights, and the second engine finds what the first one left, in place or on the host. A
    stage has layers of three groups, and the other one those of the other three."""
    GEMMA_3.fleet(tmp_path)
    write_checkpoint(tmp_path, GEMMA_3.config, seed=1)
    fleet, prompts, options = Fleet(tmp_path, "auto"), prompts_of(GEMMA_3, count, new=8), {f"{of}_parallel_size": 2}
    least_blocks = GEMMA_3.least_blocks + (64 if of == "pipeline" else 0)  # windows of a step more that is under way

    def two_ranks(socket: str | None, blocks: int) -> Engine:
        extra = {"host_blocks": 800, "verify_steps": 10}
        return fleet.engine(socket, blocks, is_split=True, extra=extra, options={**GEMMA_3.options, **options})

    with engines(two_ranks(None, 2 * GEMMA_3.blocks)) as (alone,):
        (expected, _), (_, hits) = (ask_each(alone, prompts) for _ in range(2))
    with running_node(["--shm-devices", "2", "--checksums", "all", "--write-policy", "write_through"]) as node:
        for cached in ([0] * count, hits):
            with engines(two_ranks(node.socket, least_blocks)) as (mine,):
                assert ask_each(mine, prompts) == (expected, cached)
                assert ask_each(mine, prompts) == (expected, hits)
        assert node.counters()["hit_blocks_host"] > 0
        check_daemon(node.socket)
