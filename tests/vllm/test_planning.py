"""vLLM's own plans for the caches of published models have a layout of the same bytes, or are refused by name."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from tests.vllm.rig import PYTHON_VARIABLE, ROOT, engine_environment

LAYOUTS = ("LBHNC", "BLHNC")
"""Layers outermost, and blocks."""


@pytest.fixture(scope="module")
def plans() -> dict[str, Any]:
    """Plans of the installed vLLM, and the daemon's layouts for them."""
    done = subprocess.run(
        [os.environ[PYTHON_VARIABLE], "-m", "tests.vllm.planning"],
        cwd=ROOT,
        env=engine_environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("model", "groups"),
    [
        ("Gemma 3 27B", {"window": 6, "full": 1}),
        ("gpt-oss-120b", {"window": 1, "full": 1}),
        ("Qwen3-Next-80B", {"state": 3, "full": 1}),
        ("Nemotron-H 8B", {"state": 6, "full": 1}),
        ("Llama 4 Scout", {"window": 3, "full": 1}),
        ("Jamba 1.5 mini", {"state": 7, "full": 1}),
        ("LFM2 1.2B", {"state": 3, "full": 1}),
        ("Llama 3 8B", {"full": 1}),
    ],
)
def test_a_pool_holds_as_many_blocks_as_vllm_alone(
    plans: dict[str, Any], model: str, groups: dict[str, int], layout: str
) -> None:
    plan = plans[f"{model}, {layout}"]
    assert "refused" not in plan, plan
    kinds = [kind for kind, *_ in plan["groups"]]
    assert {kind: kinds.count(kind) for kind in kinds} == groups
    assert plan["vllm_bytes"] / plan["daemon_bytes"] >= 0.99, "tokens that fit in the same memory"


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("two sizes of heads, LBHNC", "blocks of [16, 32] tokens"),
        ("DeepSeek V4, BLHNC", "blocks of [8, 64] tokens"),
        ("Mistral 7B v0.1, LBHNC", "no layer of this model keeps whole sequences"),
        ("states that drafts move, LBHNC", "for drafts move them"),
        ("states of mode all, LBHNC", "--mamba-cache-mode all"),
        ("a ring for scratch, LBHNC", "CircularBufferSpec"),
        ("cross attention, LBHNC", "CrossAttentionSpec"),
    ],
)
def test_what_has_no_layout_is_refused_by_name(plans: dict[str, Any], plan: str, words: str) -> None:
    assert words in plans[plan]["refused"]
