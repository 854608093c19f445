"""What one engine has computed is the other's, in place, and nothing is answered differently for it."""

from __future__ import annotations

from tests.e2e.rig import running_node
from tests.vllm.rig import BLOCK_TOKENS, Fleet, engines, random_prompt


def test_an_engine_finds_what_the_one_before_it_computed(fleet: Fleet) -> None:
    prompt = random_prompt(1, 10.5, new=40)
    with engines(fleet.engine(None)) as (plain,):
        expected = plain.ask(prompt)[0].said
    with running_node() as node:
        with engines(fleet.engine(node.socket)) as (first,):
            answer = first.ask(prompt)[0]
            assert (answer.said, answer.cached) == (expected, 0)
        with engines(fleet.engine(node.socket, is_split=True)) as (second,):
            answer = second.ask(prompt)[0]
            assert (answer.said, answer.cached) == (expected, 10 * BLOCK_TOKENS)
