"""Layouts of models with recurrent states from their config.json: pages and groups as in vLLM's recorded plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cachesvc_client.layouts.hf_config import ConfigKeyMissing, ConfigRejected, ConfigValueRejected, layout_of_config

from cachesvc.model.errors import LayoutRejected

PLANS = Path(__file__).parents[3] / "vllm" / "plans.jsonl"
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "torch_dtype": "bfloat16",
}
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_key_value_heads": 8,
    "attention_head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "torch_dtype": "bfloat16",
}
JAMBA = {
    "model_type": "jamba",
    "num_hidden_layers": 32,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "torch_dtype": "bfloat16",
}
LFM2 = {
    "model_type": "lfm2",
    "num_hidden_layers": 16,
    "layer_types": ["full_attention" if layer % 3 == 2 else "conv" for layer in range(16)],
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "plan"),
    [(QWEN3_NEXT, "Qwen3-Next-80B"), (NEMOTRON_H, "Nemotron-H 8B"), (JAMBA, "Jamba 1.5 mini"), (LFM2, "LFM2 1.2B")],
)
def test_pages_and_groups_are_those_of_vllms_plan(config: dict[str, Any], plan: str) -> None:
    lines = map(json.loads, PLANS.read_text(encoding="utf-8").splitlines())
    wanted = next(line for line in lines if line["plan"] == f"{plan}, LBHNC")
    layout = layout_of_config(config, block_tokens=16)
    states = [each["spec"]["kind"] == "MambaSpec" for each in wanted["groups"]]
    assert sorted(group.is_state for group in layout.groups) == sorted(states)
    assert layout.block_tokens == wanted["groups"][0]["spec"]["block_size"]
    assert {plane.page_bytes for plane in layout.planes} == {tensor[2] for tensor in wanted["tensors"]}
    assert sorted(len(layout.planes_of(group)) for group in range(len(layout.groups))) == sorted(
        len(each["layers"]) for each in wanted["groups"]
    )


def test_ranks_divide_states_and_heads() -> None:
    one, two = (layout_of_config(QWEN3_NEXT, block_tokens=16, tensor_parallel=ranks) for ranks in (1, 2))
    assert two.block_tokens == one.block_tokens
    assert two.planes[0].page_bytes * 2 == one.planes[0].page_bytes
    with pytest.raises(LayoutRejected, match="2 kv heads do not divide over 4 ranks"):
        layout_of_config(QWEN3_NEXT, block_tokens=16, tensor_parallel=4)


def test_what_cannot_be_is_refused_by_its_key() -> None:
    without = {key: value for key, value in QWEN3_NEXT.items() if key != "linear_num_value_heads"}
    with pytest.raises(ConfigKeyMissing, match="linear_num_value_heads"):
        layout_of_config(without, block_tokens=16)
    with pytest.raises(ConfigValueRejected, match="hybrid_override_pattern is 'MXM'"):
        layout_of_config(NEMOTRON_H | {"hybrid_override_pattern": "MXM"}, block_tokens=16)
    with pytest.raises(ConfigRejected, match="leave scale_dtype out"):
        layout_of_config(QWEN3_NEXT, block_tokens=16, scale_dtype="float32")
    with pytest.raises(ConfigRejected, match="leave mtp out"):
        layout_of_config(QWEN3_NEXT | {"num_nextn_predict_layers": 1}, block_tokens=16, mtp=True)
