"""Layouts out of published config.json files (the keys that matter, in tests/data/configs), and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cachesvc_client.layouts.families import IndexPage, dsa, gqa, gqa_windowed, mla, mla_windowed, with_draft
from cachesvc_client.layouts.hf_config import ConfigKeyMissing, ConfigValueRejected, UnknownModelType, layout_of_config

from cachesvc.model.errors import LayoutRejected
from cachesvc.model.layout import Layout

CONFIGS = Path(__file__).parents[3] / "data" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return config | changes


def without(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


def token_bytes(layout: Layout) -> dict[str, int]:
    """Bytes of a token in each group on one rank."""
    return {group.name: layout.page_bytes(i) // layout.block_tokens for i, group in enumerate(layout.groups)}


@pytest.mark.parametrize(
    ("name", "layers", "bytes_by_group"),
    [
        ("deepseek-v3", 61, {"full": 70_272}),
        ("deepseek-v3.2", 61, {"full": 48_068}),
        ("ernie-4.5-21b-a3b", 28, {"full": 57_344}),
        ("llama-3.1-8b", 32, {"full": 131_072}),
        ("qwen3-8b", 36, {"full": 147_456}),
        # A local layer of 27B takes 2 x 16 heads x 128 x 2 bytes; every sixth of 62 is global.
        ("gemma-3-27b", 62, {"full": 10 * 8_192, "window": 52 * 8_192}),
        ("gemma-3-4b", 34, {"full": 5 * 4_096, "window": 29 * 4_096}),
        ("gpt-oss-20b", 24, {"full": 12 * 2_048, "window": 12 * 2_048}),
    ],
)
def test_published_models(name: str, layers: int, bytes_by_group: dict[str, int]) -> None:
    layout = layout_of_config(config_of(name), block_tokens=64)
    assert (layout.layers, token_bytes(layout)) == (layers, bytes_by_group)


def test_every_config_here_is_read_at_any_block_size_and_names_its_source() -> None:
    assert len(NAMES) == 8
    layouts = [layout_of_config(config_of(name), block_tokens=size) for name in NAMES for size in (16, 32, 128)]
    assert len({layout.fingerprint for layout in layouts}) == len(layouts)
    assert all("/" in config_of(name)["_name_or_path"] for name in NAMES)


def test_they_are_the_families_of_the_client() -> None:
    def read(name: str, **wish: Any) -> Layout:
        return layout_of_config(config_of(name), block_tokens=64, tensor_parallel=4, **wish)

    def latent(layers: int, dtype: str = "bfloat16") -> Layout:
        return mla(layers=layers, kv_lora_rank=512, rope_dim=64, block_tokens=64, dtype=dtype, tensor_parallel=4)

    def sparse(layers: int, page: IndexPage = IndexPage.SPLIT) -> Layout:
        return dsa(
            layers=layers,
            kv_lora_rank=512,
            rope_dim=64,
            index_head_dim=128,
            block_tokens=64,
            index_page=page,
            tensor_parallel=4,
        )

    assert read("deepseek-v3") == latent(61)
    assert read("deepseek-v3", mtp=True) == with_draft(latent(61), latent(1))
    assert read("deepseek-v3", kv_dtype="fp8") == latent(61, "float8_e4m3fn")
    assert read("deepseek-v3.2", mtp=True) == with_draft(sparse(61), sparse(1))
    assert read("deepseek-v3.2", kv_dtype="fp8", index_page=IndexPage.FUSED) == sparse(61, IndexPage.FUSED)
    assert read("llama-3.1-8b", kv_dtype="int8", scale_dtype="fp32") == gqa(
        layers=32, kv_heads=8, head_dim=128, block_tokens=64, dtype="int8", scale_dtype="float32", tensor_parallel=4
    )
    assert read("gpt-oss-20b") == gqa_windowed(
        window_layers=[True, False] * 12,
        kv_heads=8,
        head_dim=64,
        block_tokens=64,
        window_tokens=128,
        sink_tokens=0,
        tensor_parallel=4,
    )


def test_windows_of_gemma() -> None:
    layout = layout_of_config(config_of("gemma-3-27b"), block_tokens=64)
    full = sorted({plane.layer for plane in layout.planes if plane.group == "full"})
    assert full == list(range(5, 62, 6))
    assert layout.groups[1].window_tokens == 1024
    text = config_of("gemma-3-4b")["text_config"] | {"torch_dtype": "float16"}
    every_second = layout_of_config(text | {"sliding_window_pattern": 2}, block_tokens=64)
    assert token_bytes(every_second) == {"full": 17 * 4_096, "window": 17 * 4_096}
    listed = layout_of_config(
        text | {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}, block_tokens=64
    )
    assert [plane.group for plane in listed.planes] == ["full", "full", "window", "window"]
    assert {plane.dtype for plane in listed.planes} == {"float16"}


def test_windows_of_qwen() -> None:
    config = config_of("qwen3-8b", sliding_window=4096, max_window_layers=30)
    assert token_bytes(layout_of_config(config, block_tokens=64)) == {"full": 147_456}
    layout = layout_of_config(config | {"use_sliding_window": True}, block_tokens=64)
    assert token_bytes(layout) == {"full": 30 * 4_096, "window": 6 * 4_096}
    assert min(plane.layer for plane in layout.planes if plane.group == "window") == 30


def test_windows_over_latents() -> None:
    flags = [1, 1, 1] * 15 + [1] + [0] * 15
    config = config_of("deepseek-v3", window_attn_skip_freq=flags, sliding_window=512)
    mixed = mla_windowed(
        window_layers=[flag == 1 for flag in flags], kv_lora_rank=512, rope_dim=64, block_tokens=64, window_tokens=512
    )
    assert layout_of_config(config, block_tokens=64) == mixed
    assert sum(token_bytes(mixed).values()) == 47_456
    draft = mla(layers=1, kv_lora_rank=512, rope_dim=64, block_tokens=64)
    for listed in (flags, [*flags, 0]):
        layout = layout_of_config(config | {"window_attn_skip_freq": listed}, block_tokens=64, mtp=True)
        assert layout == with_draft(mixed, draft)
    for wrong in ([*flags, 1], flags[1:], 4, [2] * 61):
        with pytest.raises(ConfigValueRejected, match="window_attn_skip_freq is"):
            layout_of_config(config | {"window_attn_skip_freq": wrong}, block_tokens=64)


def test_an_indexer_is_found_before_the_latent() -> None:
    config = config_of("deepseek-v3", index_head_dim=128)
    assert layout_of_config(config, block_tokens=64) == layout_of_config(config_of("deepseek-v3.2"), block_tokens=64)


def test_an_unknown_model_is_told_what_is_known() -> None:
    for model_type in ("mamba2", None, 7, ["llama"], "x" * 500):
        with pytest.raises(UnknownModelType, match="known are deepseek_v2, deepseek_v3, deepseek_v32,") as hit:
            layout_of_config({"model_type": model_type}, block_tokens=64)
        assert hit.value.model_type == model_type
        assert "gpt_oss" in hit.value.known
        assert len(str(hit.value)) < 480
    assert issubclass(UnknownModelType, LayoutRejected)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("deepseek-v3", "kv_lora_rank"),
        ("deepseek-v3", "qk_rope_head_dim"),
        ("deepseek-v3", "num_hidden_layers"),
        ("deepseek-v3.2", "index_head_dim"),
        ("ernie-4.5-21b-a3b", "num_key_value_heads"),
        ("ernie-4.5-21b-a3b", "hidden_size"),
        ("llama-3.1-8b", "num_hidden_layers"),
        ("qwen3-8b", "num_key_value_heads"),
        ("gemma-3-27b", "text_config"),
        ("gpt-oss-20b", "layer_types"),
        ("gpt-oss-20b", "sliding_window"),
        ("gpt-oss-20b", "head_dim"),
    ],
)
@pytest.mark.parametrize("absent", [True, False])
def test_a_missing_key_is_named(name: str, key: str, absent: bool) -> None:
    config = without(config_of(name), key) if absent else config_of(name, **{key: None})
    with pytest.raises(ConfigKeyMissing, match=f"config of [a-z0-9_]+ has no {key}") as hit:
        layout_of_config(config, block_tokens=64)
    assert hit.value.key == key


def test_the_cache_dtype_is_the_models_the_callers_or_asked_for() -> None:
    config = without(config_of("llama-3.1-8b"), "torch_dtype")
    with pytest.raises(ConfigKeyMissing, match="no dtype: say what the cache holds by kv_dtype"):
        layout_of_config(config, block_tokens=64)
    for changes, wish, dtype in (
        ({"dtype": "float16"}, "auto", "float16"),
        ({"torch_dtype": "float32"}, "auto", "float32"),
        ({}, "bf16", "bfloat16"),
        ({"torch_dtype": "bfloat16"}, "fp8", "float8_e4m3fn"),
    ):
        layout = layout_of_config(config | changes, block_tokens=64, kv_dtype=wish)
        assert {plane.dtype for plane in layout.planes} == {dtype}


def test_query_heads_of_their_own() -> None:
    layout = layout_of_config(without(config_of("llama-3.1-8b"), "num_key_value_heads"), block_tokens=64)
    assert layout.planes[0].page_shape == (32, 64, 128)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama-3.1-8b", {"num_hidden_layers": "32"}, "num_hidden_layers is '32', but must be a whole number"),
        ("llama-3.1-8b", {"num_hidden_layers": True}, "num_hidden_layers is True"),
        ("llama-3.1-8b", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ("llama-3.1-8b", {"num_hidden_layers": 1e3}, "num_hidden_layers is 1000.0"),
        ("llama-3.1-8b", {"num_hidden_layers": 10**30}, "num_hidden_layers is 10000"),
        ("llama-3.1-8b", {"num_attention_heads": 33}, "hidden_size is 4096, but must be a multiple of 33 heads"),
        ("llama-3.1-8b", {"torch_dtype": "int4"}, "torch_dtype is 'int4'"),
        ("llama-3.1-8b", {"torch_dtype": ["x"]}, "torch_dtype is "),
        ("gemma-3-27b", {"text_config": [1]}, "text_config is .1., but must be an object"),
        ("gpt-oss-20b", {"layer_types": ["sliding_attention"] * 3}, "one entry for each of 24 layers"),
        ("gpt-oss-20b", {"layer_types": ["linear_attention"] * 24}, "layer_types is 'linear_attention'"),
        ("gpt-oss-20b", {"layer_types": [{}] * 24}, "layer_types is {}"),
    ],
)
def test_a_bad_value_is_named(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigValueRejected, match=words) as hit:
        layout_of_config(config_of(name, **changes), block_tokens=64)
    assert "\n" not in str(hit.value)


@pytest.mark.parametrize(
    ("name", "wish", "words"),
    [
        ("llama-3.1-8b", {"tensor_parallel": 3}, "8 kv heads do not divide over 3 ranks"),
        ("ernie-4.5-21b-a3b", {"tensor_parallel": 8}, "4 kv heads do not divide over 8 ranks"),
        ("llama-3.1-8b", {"mtp": True}, "no num_nextn_predict_layers: it names no MTP layers; leave mtp out"),
        ("llama-3.1-8b", {"kv_dtype": "int4"}, "unknown dtype 'int4'; known are uint8"),
        ("llama-3.1-8b", {"scale_dtype": "fp32"}, "scales of float32 belong to values of one byte"),
        ("deepseek-v3", {"scale_dtype": "fp32"}, "latents have no scales of their own"),
        ("deepseek-v3.2", {"scale_dtype": "fp32"}, "latents have no scales of their own"),
        ("deepseek-v3.2", {"kv_dtype": "bf16"}, "packed fp8 rows, not bfloat16: leave kv_dtype out"),
        ("deepseek-v3", {"tensor_parallel": 65}, "ranks must be in 1..64"),
    ],
)
def test_a_wish_that_cannot_be_is_refused(name: str, wish: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutRejected, match=words):
        layout_of_config(config_of(name), block_tokens=64, **wish)


def test_a_model_of_many_layers_is_refused_and_not_built() -> None:
    with pytest.raises(LayoutRejected, match=r"layers must be 1\.\.4096, got 1000000"):
        layout_of_config(config_of("llama-3.1-8b", num_hidden_layers=1_000_000), block_tokens=64)


PLAIN = {
    "model_type": "novel",
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_size": 3584,
    "use_sliding_window": False,
    "sliding_window": 131072,
    "max_window_layers": 28,
    "torch_dtype": "bfloat16",
}


def test_a_model_type_that_is_not_known_can_be_taken_for_plain_attention_by_its_callers_word() -> None:
    with pytest.raises(UnknownModelType, match=r"unknown model_type 'novel'.*assume='gqa' .--assume gqa.,"):
        layout_of_config(PLAIN, block_tokens=64)
    expected = gqa(layers=28, kv_heads=4, head_dim=128, block_tokens=64, tensor_parallel=2)
    assert layout_of_config(PLAIN, block_tokens=64, tensor_parallel=2, assume="gqa") == expected
    alone = without(PLAIN, "sliding_window") | {"model_type": None}
    assert layout_of_config(alone, block_tokens=64, tensor_parallel=2, assume="gqa") == expected
    known = config_of("deepseek-v3")
    assert layout_of_config(known, block_tokens=64, assume="gqa") == layout_of_config(known, block_tokens=64)


def test_common_types_are_read_without_an_assumption() -> None:
    expected = gqa(layers=28, kv_heads=4, head_dim=128, block_tokens=64)
    for model_type in ("qwen2", "qwen2_moe", "granite", "olmo2"):
        assert layout_of_config(PLAIN | {"model_type": model_type}, block_tokens=64) == expected
    mistral = without(PLAIN, "sliding_window") | {"model_type": "mistral"}
    assert layout_of_config(mistral, block_tokens=64) == expected
    windowed = layout_of_config(mistral | {"sliding_window": 4096}, block_tokens=64)
    assert [group.window_tokens for group in windowed.own_groups] == [4096], "Mistral 7B 0.1"
    latent = config_of("deepseek-v3")
    for model_type in ("deepseek_v2", "kimi_k2"):
        named = latent | {"model_type": model_type}
        assert layout_of_config(named, block_tokens=64) == layout_of_config(latent, block_tokens=64)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"use_sliding_window": True}, "sliding_window is 131072.*gqa_windowed"),
        ({"layer_types": ["sliding_attention"] * 28}, "gqa_windowed"),
        ({"layer_types": ["full_attention", "linear_attention"] * 14}, "layer_types"),
        ({"kv_lora_rank": 512}, "kv_lora_rank is 512, but must be absent"),
        ({"text_config": {"num_hidden_layers": 28}}, "text_config"),
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
    ],
)
def test_what_a_configuration_says_against_it_is_believed(change: dict[str, Any], match: str) -> None:
    with pytest.raises(LayoutRejected, match=match):
        layout_of_config(PLAIN | change, block_tokens=64, assume="gqa")
    with pytest.raises(LayoutRejected, match="assume is 'mla'"):
        layout_of_config(PLAIN, block_tokens=64, assume="mla")
