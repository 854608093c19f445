"""Inputs beside the model that decide a page's bytes, or how it is computed: shared by engines that agree on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.rig import running_node
from tests.vllm.image_model import OPTIONS, write_image_model
from tests.vllm.rig import BLOCK_TOKENS, Fleet, engines, random_prompt

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


IS_WIDE = "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
NARROW = pytest.mark.skipif(not IS_WIDE, reason="vLLM has caches of fp8 on processors with AVX-512 alone")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"kv_cache_dtype": "fp8"}, id="fp8", marks=NARROW),
        pytest.param({"speculative_config": NGRAM}, id="ngram"),
    ],
)
def test_engines_that_agree_share_and_others_do_not(fleet: Fleet, options: dict[str, Any]) -> None:
    prompts = [random_prompt(each, 6.5, new=60) for each in range(4)]
    with engines(fleet.engine(None, caching=False, options=options)) as (plain,):
        expected = [answer.said for answer in plain.ask(*prompts)]
    with running_node() as node:
        for found in (0, 6):
            with engines(fleet.engine(node.socket, options=options)) as (mine,):
                answers = mine.ask(*prompts)
                assert [answer.said for answer in answers] == expected
                assert [answer.cached for answer in answers] == [found * BLOCK_TOKENS] * 4
                if found:
                    mine.plant_wrong_pages()
                    assert mine.ask(prompts[0])[0].said != expected[0], "wrong pages would show"
        with engines(fleet.engine(node.socket)) as (other,):
            assert other.ask(prompts[0])[0].cached == 0


def test_prompts_share_under_the_same_image_alone(tmp_path: Path) -> None:
    """Whatever clients call it: the last prompts name another image as the first ones named theirs, and theirs
    otherwise."""
    write_image_model(tmp_path)
    fleet, plain = Fleet(tmp_path), random_prompt(1, 6.5)
    longer = replace(plain, tokens=plain.tokens[: 3 * BLOCK_TOKENS] + random_prompt(2, 4).tokens, image=1)
    prompts = [plain, *(replace(plain, image=each) for each in (1, 2, 1)), longer, replace(plain, image=2)]
    named = [(1, "ab" * 32), (2, "img-0")]
    prompts += [replace(plain, image=image, image_name=name) for image, name in named]
    swapped = [replace(plain, image=image, image_name=name) for image, name in ((3, named[0][1]), (1, named[1][1]))]
    with engines(fleet.engine(None, caching=False, options=OPTIONS)) as (alone,):
        expected = [alone.ask(prompt)[0].said for prompt in prompts]
    assert len(set(expected[:3])) == 3
    with running_node() as node:
        for found in ((0, 0, 0, 6, 3, 6, 6, 6), (6, 6, 6, 6, 7, 6, 6, 6)):
            with engines(fleet.engine(node.socket, options=OPTIONS)) as (mine,):
                answers = [mine.ask(prompt)[0] for prompt in prompts]
                assert [answer.said for answer in answers] == expected
                assert [answer.cached // BLOCK_TOKENS for answer in answers] == list(found)
        with engines(fleet.engine(node.socket, options=OPTIONS)) as (other,):
            answers = [other.ask(prompt)[0] for prompt in swapped]
            assert [answer.cached // BLOCK_TOKENS for answer in answers] == [0, 6]
            assert answers[0].said not in expected
            assert answers[1].said == expected[1]
            other.plant_wrong_pages()
            assert other.ask(prompts[1])[0].said != expected[1], "wrong pages would show"
