"""Two real vLLM engines hand over prompts that end anywhere in a block, and a daemon dies or evicts in between."""

from __future__ import annotations

import json

from kvcache.v1 import admin_pb2

from tests.e2e.rig import Node, running_node, wait_until
from tests.vllm.rig import BLOCK_TOKENS, Answer, Engine, Fleet, Prompt, engines, random_prompt
from tests.vllm.test_handover import DECODES, handed

LENGTHS = [
    full * BLOCK_TOKENS + rest
    for full in (0, 1, 3)
    for rest in (0, 1, BLOCK_TOKENS // 2, BLOCK_TOKENS - 1)
    if full * BLOCK_TOKENS + rest > 1
]
"""Tokens of prompts that end with a block, one token behind it, in the middle of one, and one token before its end."""

LENDS = ("--peer-listen", "127.0.0.1:0", "--write-policy", "write_through")

CLOSE = 0.02
"""Most by which log-probabilities differ where kernels of one token and of many round otherwise."""


def prompts(seed: int) -> list[Prompt]:
    """A prompt of each length."""
    return [random_prompt(seed + length, length / BLOCK_TOKENS, new=BLOCK_TOKENS + 4) for length in LENGTHS]


def logprobs(answer: Answer) -> list[float]:
    """Those of the two most likely tokens at each place."""
    return [value for sample in json.loads(answer.logprobs) for at in sample for _, value in at]


def check(answer: Answer, expected: Answer) -> float:
    """Check that an answer is vLLM's own; return the largest difference of a log-probability."""
    assert answer.tokens == expected.tokens
    pairs = zip(logprobs(answer), logprobs(expected), strict=True)
    return max(abs(mine - theirs) for mine, theirs in pairs)


def evict(node: Node, *tiers: str) -> None:
    """Have a daemon evict all that nothing uses."""
    for tier in tiers:
        node.admin.Evict(admin_pb2.EvictRequest(model_id=1, tier=tier))


def test_of_a_prompt_of_any_length_the_decoder_computes_one_token(fleet: Fleet, plain: Engine) -> None:
    asked = prompts(100)
    expected = [plain.ask(each)[0] for each in asked]
    with running_node(LENDS) as prefiller, running_node(DECODES) as decoder:
        patient = {"remote_patience_ms": 60_000}
        started = fleet.engine(prefiller.socket), fleet.engine(decoder.socket, extra=patient)
        with engines(*started) as (one, two):
            routed = [handed(each, one) for each in asked]
            off = 0.0
            for where in ("from the other node", "in place", "on the host"):
                if where == "on the host":
                    evict(decoder, "device")
                for prompt, said in zip(routed, expected, strict=True):
                    [answer] = two.ask(prompt)
                    assert answer.cached == len(prompt.tokens) - 1, (where, len(prompt.tokens))
                    off = max(off, check(answer, said))
            evict(decoder, "device")
            for answer, said in zip(two.ask(*routed), expected, strict=True):  # loads beside others
                off = max(off, check(answer, said))
            assert off <= CLOSE
        assert [node.problems() for node in (prefiller, decoder)] == [[], []]


def test_what_the_prefiller_has_lost_since_is_computed(fleet: Fleet, plain: Engine) -> None:
    asked = prompts(300)
    expected = [plain.ask(each)[0] for each in asked]
    with running_node(LENDS) as prefiller, running_node(DECODES) as decoder:
        started = fleet.engine(prefiller.socket), fleet.engine(decoder.socket, extra={"remote_patience_ms": 60_000})
        with engines(*started) as (one, two):
            routed = [handed(each, one) for each in asked]
            half = len(routed) // 2
            evict(prefiller, "device", "host")
            for prompt, said in zip(routed[:half], expected[:half], strict=True):
                [answer] = two.ask(prompt)
                assert answer.cached == 0
                assert check(answer, said) <= CLOSE
            routed = [*routed[:half], *(handed(each, one) for each in asked[half:])]
            prefiller.daemon.kill()
            for prompt, said in zip(routed[half:], expected[half:], strict=True):
                [answer] = two.ask(prompt)
                assert answer.cached == 0
                assert check(answer, said) <= CLOSE
            one.kill()
        wait_until(lambda: not decoder.problems(), "the decoder's daemon is sound")
