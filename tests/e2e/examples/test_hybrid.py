"""The hybrid example: the same bits with and without a cache, in one process and over two, from the host and anew."""

from __future__ import annotations

import numpy as np
import pytest
from cachesvc_client import CacheClient

from examples.hybrid import BLOCK_TOKENS, CHUNK_BLOCKS, VOCAB, HybridEngine, hybrid_layout, toy_model
from tests.e2e.rig import Node, wait_until

CHUNK_TOKENS = CHUNK_BLOCKS * BLOCK_TOKENS


def prompt(seed: int, tokens: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, VOCAB, tokens).tolist()
    return found


@pytest.mark.parametrize("device_pages", [256, 40])
def test_an_answer_has_the_same_bits_whatever_was_cached(node: Node, device_pages: int) -> None:
    wait_until(node.has_host_pool, "the host pool is there")
    prompts = [prompt(seed, tokens) + prompt(9, more) for seed in (1, 2, 3) for tokens, more in ((50, 0), (50, 9))]
    with CacheClient(node.socket, engine="hybrid") as client:

        def engine(salt: bytes) -> HybridEngine:
            made = client.register(
                "toy@1", hybrid_layout(), tenant_salt=salt, device_pages=[device_pages] * 3, host_pages=[200] * 3
            )
            return HybridEngine(client.open_lease(made), toy_model())

        alone = [engine(b"%d" % number).answer(each, 10) for number, each in enumerate(prompts)]
        assert {answer.cached_tokens for answer in alone} == {0}
        one, other = engine(b"shared"), engine(b"shared")
        first = [one.answer(each, 10) for each in prompts]
        again = [other.answer(each, 10) for each in prompts]
        assert [answer.tokens for answer in first] == [answer.tokens for answer in alone]
        assert [answer.tokens for answer in again] == [answer.tokens for answer in alone]
        cached = [answer.cached_tokens for answer in first]
        assert cached[0::2] == [0, 0, 0]
        assert all(0 < tokens < 50 for tokens in cached[1::2])
        assert all(answer.cached_tokens >= CHUNK_TOKENS for answer in again)
        assert all(answer.full_tokens >= answer.cached_tokens for answer in (*first, *again))
    assert node.problems() == []
