"""vLLM's own plans for the caches of published models have a layout of the same bytes, or are refused by name. They
were recorded (``tests/vllm/planning.py``), and both releases make the same."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cachesvc_client.plugins.keeper import ConnectorRefused
from cachesvc_vllm.cache_groups import cache_groups, group_parts, place_wider_first, slab_layout

from cachesvc.model.layout import device_bytes
from tests.unit.rigs.vllm_rig import KVCacheConfig, KVCacheTensor

LAYOUTS = ("LBHNC", "BLHNC")
"""Layers outermost, and blocks."""
RECORDED = Path(__file__).parents[3] / "vllm/plans.jsonl"


@cache
def recorded() -> dict[str, dict[str, Any]]:
    """Plans by model and layout."""
    lines = RECORDED.read_text(encoding="utf-8").splitlines()
    return {plan["plan"]: plan for plan in map(json.loads, lines)}


def spec_of(facts: dict[str, Any]) -> Any:
    """A spec by the name of vLLM's class, with what the connector reads of it."""
    fields = dict(facts)
    if "specs" in fields:
        fields["kv_cache_specs"] = dict(enumerate(map(spec_of, fields.pop("specs"))))
    return type(fields.pop("kind"), (SimpleNamespace,), {})(**fields)


def config_of(plan: str) -> KVCacheConfig:
    """The plan as vLLM's configuration, where the connector has it place its layers."""
    facts = recorded()[plan]
    tensors = [
        KVCacheTensor(size, list(map(str, layers)), layer_stride, block_stride, offset)
        for size, layer_stride, block_stride, offset, layers in facts["tensors"]
    ]
    groups: list[Any] = [
        SimpleNamespace(kv_cache_spec=spec_of(each["spec"]), layer_names=list(map(str, each["layers"])))
        for each in facts["groups"]
    ]
    config = KVCacheConfig(facts["num_blocks"], tensors, groups, hash_block_size=facts["hash_block_size"])
    place_wider_first(config)
    return config


@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize(
    ("model", "groups"),
    [
        ("Gemma 3 27B", {"window": 6, "full": 1}),
        ("gpt-oss-120b", {"window": 1, "full": 1}),
        ("Qwen3-Next-80B", {"state": 3, "full": 1}),
        ("states that drafts move", {"state": 3, "full": 1}),
        ("Nemotron-H 8B", {"state": 6, "full": 1}),
        ("Llama 4 Scout", {"window": 3, "full": 1}),
        ("Jamba 1.5 mini", {"state": 7, "full": 1}),
        ("LFM2 1.2B", {"state": 3, "full": 1}),
        ("Llama 3 8B", {"full": 1}),
        ("Mistral 7B v0.1", {"window": 1}),
    ],
)
def test_a_pool_holds_as_many_blocks_as_vllm_alone(model: str, groups: dict[str, int], layout_name: str) -> None:
    config = config_of(f"{model}, {layout_name}")
    layout = slab_layout(config)
    kinds = [each.retention.value for each in cache_groups(config)]
    assert {kind: kinds.count(kind) for kind in kinds} == groups
    assert len(layout.own_groups) == len(kinds)
    assert fit(config) >= 0.99


@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize(
    "dtype",
    [
        *("int4_per_token_head", "int8_per_token_head", "fp8_per_token_head", "nvfp4"),
        *("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_3bit_nc"),
        "turboquant_4bit_nc but for four layers",
    ],
)
def test_packed_types_of_kv_have_pages_of_the_same_bytes(dtype: str, layout_name: str) -> None:
    """Scales lie in the page behind what they scale, so a page is whole by itself."""
    config = config_of(f"Llama 3 8B in {dtype}, {layout_name}")
    layout = slab_layout(config)
    assert [group.is_full for group in layout.groups] == [True]
    assert fit(config) >= 0.99


def fit(config: KVCacheConfig) -> float:
    """Blocks in the same memory, as a part of vLLM's."""
    layout = slab_layout(config)
    return config.kv_cache_tensors[0].size / device_bytes(layout, (config.num_blocks,) * len(layout.own_groups))


@pytest.mark.parametrize(
    ("plan", "block_tokens", "parts"),
    [
        ("Gemma 4 31B, LBHNC", 32, [2, 2, 2, 2, 2, 1]),
        ("Gemma 4 E4B, LBHNC", 32, [1, 1, 1, 1, 1, 2]),
        ("DeepSeek V4, BLHNC", 256, [4, 4, 1, 64, 32]),
    ],
)
def test_groups_with_smaller_blocks_have_several_pages_in_each_of_the_layout(
    plan: str, block_tokens: int, parts: list[int]
) -> None:
    config = config_of(plan)
    layout = slab_layout(config)
    assert layout.block_tokens == block_tokens
    assert sorted(each.count for each in group_parts(config)) == sorted(parts)
    assert len(layout.groups) == sum(parts)
    assert layout.pools == (tuple(range(len(layout.groups))),)
    assert fit(config) >= 0.99


def test_most_pages_of_a_short_window_are_scratch() -> None:
    """DeepSeek V4 needs two of four pages with 64 tokens, two of 64 with four, and 16 of 32 with eight."""
    config = config_of("DeepSeek V4, BLHNC")
    layout = slab_layout(config)
    needed = [
        [layout.window_of(group) for group in each.groups if not layout.groups[group].is_scratch]
        for each in group_parts(config)
        if each.count > 1
    ]
    assert needed == [[64, 128], [64, 128], [4, 8], list(range(8, 129, 8))]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("states of mode all, LBHNC", "--mamba-cache-mode all"),
        ("a ring for scratch, LBHNC", "CircularBufferSpec"),
        ("cross attention, LBHNC", "CrossAttentionSpec"),
    ],
)
def test_what_has_no_layout_is_refused_by_name(plan: str, words: str) -> None:
    with pytest.raises(ConnectorRefused, match=words):
        slab_layout(config_of(plan))
