"""Keys that cover what a drafter reads ahead: one for each continuation, computed once, and no earlier than known."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from cachesvc_client.plugins.keeper import ConnectorRefused
from cachesvc_vllm.plain import LookaheadKeys, computed_blocks, draft_lookahead, has_late_kernels

BLOCK = 4


@dataclass
class Request:
    """The part of vLLM's request that the keys need."""

    all_token_ids: list[int]
    request_id: str = "r"
    mm_features: tuple[object, ...] = ()
    prompt_embeds: object = None
    extra: object = None
    asked: list[tuple[int, int]] = field(default_factory=list)

    @property
    def block_hashes(self) -> list[bytes]:
        """Chained, of full blocks."""
        ends = range(BLOCK, len(self.all_token_ids) + 1, BLOCK)
        return [repr(self.all_token_ids[:end]).encode().rjust(32)[-32:] for end in ends]


def extra_of(request: Request, first: int, end: int) -> object:
    request.asked.append((first, end))
    return request.extra


def keys(lookahead: int = 1) -> LookaheadKeys:
    return LookaheadKeys(lookahead, BLOCK, extra_of)


def test_without_lookahead_keys_are_the_hashes_themselves() -> None:
    request = Request(list(range(9)))
    assert keys(0).of(request) == request.block_hashes


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_block_of_several_hashes_has_the_last_one(lookahead: int) -> None:
    request = Request(list(range(27)))
    double = LookaheadKeys(lookahead, 2 * BLOCK, extra_of)
    double.hashes_a_block = 2
    assert double.of(request) == keys(lookahead).of(request)[1::2][:3]
    assert len(double.of(request)) == 3


@pytest.mark.parametrize("lookahead", [1, 2, 3, 4])
def test_a_block_has_a_key_once_what_lies_behind_it_is_known(lookahead: int) -> None:
    for tokens in range(20):
        expected = max(0, (tokens - lookahead) // BLOCK)
        assert len(keys(lookahead).of(Request(list(range(tokens))))) == expected


@pytest.mark.parametrize("lookahead", [1, 3])
def test_a_key_is_of_its_prefix_and_of_the_tokens_ahead_and_of_nothing_else(lookahead: int) -> None:
    rng = random.Random(lookahead)
    for _ in range(200):
        tokens = [rng.randrange(3) for _ in range(12)]
        other = [*tokens[:8], *(rng.randrange(3) for _ in range(4))]
        mine, its = keys(lookahead).of(Request(tokens)), keys(lookahead).of(Request(other))
        assert mine[0] == its[0]
        assert (mine[1] == its[1]) == (tokens[: 8 + lookahead] == other[: 8 + lookahead])
        assert mine[1] != keys(lookahead % 3 + 1).of(Request(tokens))[1]


def test_keys_are_computed_once_as_a_request_grows_and_again_where_its_end_was_replaced() -> None:
    known, request = keys(), Request(list(range(9)))
    first = list(known.of(request))
    request.all_token_ids += range(9, 18)
    assert known.of(request)[:2] == first
    assert len(request.asked) == 4
    request.all_token_ids[16] = 99
    assert known.of(request) == keys().of(Request(list(request.all_token_ids)))
    known.forget("r")
    known.forget("r")
    assert known.of(request) == keys().of(Request(list(request.all_token_ids)))


def test_what_vllm_hashes_beside_the_tokens_ahead_is_in_the_key() -> None:
    tokens = list(range(9))
    assert keys().of(Request(tokens, extra=("mm", "a", 0))) != keys().of(Request(tokens, extra=("mm", "b", 0)))
    assert keys().of(Request(tokens, extra=None)) == keys().of(Request(tokens))


@pytest.mark.parametrize(("redrafted", "sealed"), [(0, 2), (1, 1), (4, 1), (5, 0)])
def test_what_a_drafter_of_several_modules_writes_again_is_not_sealed(redrafted: int, sealed: int) -> None:
    found = computed_blocks(
        computed_tokens=10, in_flight_tokens=2, block_tokens=BLOCK, keys=9, redrafted_tokens=redrafted
    )
    assert found == sealed


def test_how_far_a_drafter_reads_ahead_is_what_vllm_says() -> None:
    def config(speculative: object) -> Any:
        return SimpleNamespace(speculative_config=speculative, num_prefill_lookahead_tokens=3)

    assert draft_lookahead(config(None)) == 0
    assert draft_lookahead(config(SimpleNamespace(use_eagle=lambda: False))) == 0
    assert draft_lookahead(config(SimpleNamespace(use_eagle=lambda: True))) == 3


@pytest.mark.parametrize(
    ("has_drafter", "has_kv", "has_states", "is_late"),
    [(False, False, True, False), (True, False, False, False), (True, True, False, True), (True, False, True, True)],
)
def test_kernels_run_behind_an_output_with_a_drafter_s_kv_and_with_accepted_states(
    has_drafter: bool, has_kv: bool, has_states: bool, is_late: bool
) -> None:
    drafter = SimpleNamespace(uses_draft_kv_cache=lambda: has_kv) if has_drafter else None
    config: Any = SimpleNamespace(speculative_config=drafter, model_config=SimpleNamespace(is_hybrid=has_states))
    assert has_late_kernels(config) == is_late


def test_a_drafter_that_reads_further_ahead_than_a_block_is_refused() -> None:
    keys(BLOCK)
    with pytest.raises(
        ConnectorRefused, match=rf"reads 5 tokens ahead, more than a block has \({BLOCK}\).*--block-size"
    ):
        keys(BLOCK + 1)
