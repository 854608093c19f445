"""Tiny models with one cache group or several: windows beside whole sequences, and recurrent states beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.vllm.rig import BLOCK_TOKENS, MODEL, Fleet

WINDOW_TOKENS = 2 * BLOCK_TOKENS


@dataclass(frozen=True)
class HybridModel:
    """``config``: its config.json. ``block_tokens``: as vLLM makes them. ``blocks``: of its pool, in the tests;
    ``least_blocks``: hardly more than vLLM starts with. ``options``: of its engines. ``repeats_bits``: its kernels give
    a request the same bits in each batch."""

    config: Mapping[str, Any]
    block_tokens: int = BLOCK_TOKENS
    blocks: int = 256
    least_blocks: int = 128
    options: Mapping[str, Any] = field(default_factory=dict)
    repeats_bits: bool = True

    def fleet(self, folder: Path) -> Fleet:
        """Engines of random weights, the same in each of them."""
        (folder / "config.json").write_text(json.dumps(dict(self.config)), encoding="utf-8")
        return Fleet(folder)

    def repeating_fleet(self, folder: Path) -> Fleet:
        """Engines whose answers do not depend on what else is in a batch, if need be by weights that hardly count."""
        fleet = self.fleet(folder)
        return fleet if self.repeats_bits else replace(fleet, weight_scale=0.001)


def _gqa(**values: Any) -> dict[str, Any]:
    return {**MODEL, "num_hidden_layers": 4, "rms_norm_eps": 1e-6, **values}


LLAMA = HybridModel(_gqa())
"""One group, of whole sequences."""

MISTRAL = HybridModel(
    _gqa(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=WINDOW_TOKENS),
    blocks=96,
    least_blocks=24,
    options={"max_num_batched_tokens": 256},
)
"""One group, of windows: no layer keeps whole sequences."""

GEMMA_3 = HybridModel(
    _gqa(
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        num_hidden_layers=6,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=32,
        rope_local_base_freq=10000.0,
        sliding_window=WINDOW_TOKENS,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    ),
    blocks=384,
    options={"max_num_batched_tokens": 256},
)
"""Five groups of windows and one of whole sequences."""

GEMMA_4 = HybridModel(
    _gqa(
        architectures=["Gemma4ForCausalLM"],
        model_type="gemma4_text",
        num_hidden_layers=6,
        hidden_activation="gelu_pytorch_tanh",
        global_head_dim=64,
        hidden_size_per_layer_input=0,
        sliding_window=2 * WINDOW_TOKENS,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    ),
    block_tokens=2 * BLOCK_TOKENS,
    blocks=384,
    options={"max_num_batched_tokens": 256},
)
"""Groups as Gemma 3 has them, with wider heads where whole sequences are kept: blocks there have half the tokens."""

GPT_OSS = HybridModel(
    _gqa(
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        sliding_window=WINDOW_TOKENS,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        initial_context_length=4096,
        swiglu_limit=7.0,
        attention_bias=True,
    ),
    blocks=192,
    least_blocks=88,
    options={"max_num_batched_tokens": 512},
)
"""Sinks, experts, and a group of windows beside one of whole sequences."""

QWEN_3_NEXT = HybridModel(
    _gqa(
        architectures=["Qwen3NextForCausalLM"],
        model_type="qwen3_next",
        linear_conv_kernel_dim=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        full_attention_interval=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        mlp_only_layers=[],
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        partial_rotary_factor=0.25,
    ),
    block_tokens=288,
    blocks=64,
    least_blocks=24,
    options={"max_num_batched_tokens": 576, "dtype": "bfloat16"},  # its kernels for processors know no other
    repeats_bits=False,
)
"""Three groups of gated delta networks' states, and one of whole sequences, whose blocks are as large as a state."""
