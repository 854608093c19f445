"""Prefill on one node, decode on another: token by token what one engine alone answers, whichever node dies."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from cachesvc_client import AttachedPool, CacheClient, Lease

from examples.engine import CachedEngine, answer_alone, layout_of
from examples.handover import DecodeEngine, PrefillEngine
from examples.tiny_transformer.model import TinyTransformer, build_model
from examples.tiny_transformer.tokens import Tokens
from tests.e2e.examples.test_example_engine import BLOCK_TOKENS, VARIANTS
from tests.e2e.rig import Node, running_node, wait_until
from tests.e2e.storage.test_nodes import LENDING, borrowing_of, is_all_back
from tests.unit.examples.tiny_rig import make_prompt, with_blocks

NEW_TOKENS = 20
PAGES = 48
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 70, 96)
"""Around the edges of blocks, and several of them."""


@contextmanager
def engine_room(node: Node, model: TinyTransformer) -> Iterator[tuple[Lease, AttachedPool]]:
    layout = layout_of(model.config)
    pages = [PAGES] * len(layout.groups)
    with ExitStack() as stack:
        client = stack.enter_context(CacheClient(node.socket, engine="example"))
        registration = client.register(f"{model.config.name}@1", layout, device_pages=pages, host_pages=pages)
        lease = stack.enter_context(client.open_lease(registration))
        yield lease, stack.enter_context(lease.attach())


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Node, Node]]:
    """One that prefills and lends, and one that decodes."""
    with running_node(LENDING) as lender, running_node(borrowing_of(lender)) as borrower:
        yield lender, borrower


@pytest.fixture(params=VARIANTS)
def model(request: pytest.FixtureRequest) -> TinyTransformer:
    return build_model(with_blocks(request.param, BLOCK_TOKENS, max_positions=256))


def alone(model: TinyTransformer, prompt: Tokens) -> list[int]:
    return answer_alone(model, prompt, NEW_TOKENS, 0.0, "to compare with").tokens


def test_every_family_goes_on_where_the_other_node_has_stopped(
    nodes: tuple[Node, Node], model: TinyTransformer
) -> None:
    with engine_room(nodes[0], model) as one, engine_room(nodes[1], model) as two:
        prefill, decode = PrefillEngine(model, *one), DecodeEngine(model, *two)
        for length in LENGTHS:
            prompt = make_prompt(length, seed=length)
            done = prefill.prefill(prompt)
            answer = decode.answer(prompt, done.first_token, NEW_TOKENS)
            assert answer.went_alone == ""
            assert answer.tokens == alone(model, prompt), length
            assert answer.host_tokens + answer.device_tokens == length // BLOCK_TOKENS * BLOCK_TOKENS
        partial = [length for length in LENGTHS if length % BLOCK_TOKENS]
        assert decode.tails == len(partial), "every last block came over, whatever its length"
    for node in nodes:
        wait_until(lambda node=node: not any(node.held().values()), "no page is held")  # type: ignore[misc]
        assert node.problems() == []
    wait_until(lambda: is_all_back(nodes[0]), "nothing is lent")


def test_a_tail_is_of_its_length_and_its_tokens(nodes: tuple[Node, Node]) -> None:
    """A prompt that goes on where another one ends takes its full blocks, and not its tail."""
    model = build_model(with_blocks("gqa", BLOCK_TOKENS, max_positions=256))
    long = make_prompt(90, seed=5)
    with engine_room(nodes[0], model) as one, engine_room(nodes[1], model) as two:
        prefill, decode = PrefillEngine(model, *one), DecodeEngine(model, *two)
        prefill.prefill(long[:75])
        first = alone(model, long)[0]
        assert decode.answer(long, first, NEW_TOKENS).tokens == alone(model, long)
        assert decode.tails == 0
        engine = CachedEngine(model, *two)
        assert engine.answer(long[:75], NEW_TOKENS).tokens == alone(model, long[:75])


def test_a_page_that_came_over_is_not_written_by_who_decodes(nodes: tuple[Node, Node]) -> None:
    """Two requests of the same prompt go on from the same tail, each in a page of its own."""
    model = build_model(with_blocks("gqa", BLOCK_TOKENS, max_positions=256))
    prompt = make_prompt(41, seed=77)
    with engine_room(nodes[0], model) as one, engine_room(nodes[1], model) as two:
        first = PrefillEngine(model, *one).prefill(prompt).first_token
        decode = DecodeEngine(model, *two)
        for _ in range(3):
            assert decode.answer(prompt, first, NEW_TOKENS).tokens == alone(model, prompt)
        assert decode.tails == 3


@pytest.mark.parametrize("seed", range(4))
def test_whoever_prefills_may_die_at_any_point(seed: int) -> None:
    model = build_model(with_blocks("gqa", BLOCK_TOKENS, max_positions=256))
    rng = random.Random(seed)
    prompts = [make_prompt(length, seed=1000 * seed + length) for length in (70, 45, 90, 33)]
    with running_node(LENDING) as lender, running_node(borrowing_of(lender)) as borrower:
        with engine_room(borrower, model) as two, engine_room(lender, model) as one:
            prefill = PrefillEngine(model, *one)
            firsts = [prefill.prefill(prompt).first_token for prompt in prompts]
            killer = threading.Timer(rng.uniform(0, 0.4), lender.daemon.process.kill)
            killer.start()
            decode = DecodeEngine(model, *two)
            for prompt, first in zip(prompts, firsts, strict=True):
                answer = decode.answer(prompt, first, NEW_TOKENS)
                assert answer.tokens == alone(model, prompt)
                assert answer.went_alone == ""
            killer.join()
            lender.daemon.process.wait()
        wait_until(lambda: not any(borrower.held().values()), "no page is held")
        assert borrower.problems() == []


@pytest.mark.parametrize("seed", range(4))
def test_whoever_decodes_may_die_at_any_point(seed: int) -> None:
    """Its engine computes by itself; what was lent to its node comes back within a lease."""
    model = build_model(with_blocks("gqa", BLOCK_TOKENS, max_positions=256))
    rng = random.Random(seed)
    prompts = [make_prompt(length, seed=2000 * (seed + 1) + length) for length in (70, 45, 90, 33)]
    with (
        running_node([*LENDING, "--peer-lease-seconds", "1"]) as lender,
        running_node(borrowing_of(lender)) as borrower,
    ):
        with engine_room(lender, model) as one:
            prefill = PrefillEngine(model, *one)
            firsts = [prefill.prefill(prompt).first_token for prompt in prompts]
            with engine_room(borrower, model) as two:
                killer = threading.Timer(rng.uniform(0, 0.4), borrower.daemon.process.kill)
                killer.start()
                decode = DecodeEngine(model, *two)
                for prompt, first in zip(prompts, firsts, strict=True):
                    assert decode.answer(prompt, first, NEW_TOKENS).tokens == alone(model, prompt)
                killer.join()
                borrower.daemon.process.wait()
        wait_until(
            lambda: lender.counters().get("lent_blocks", 0) == lender.counters().get("lent_blocks_back", 0),
            "all is back",
        )
        assert lender.problems() == []
