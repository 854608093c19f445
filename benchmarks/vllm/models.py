"""Shapes of models for ``benchmarks.vllm``, with random weights: what their attention and their drafters need."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.vllm.engine import MODEL, TINY

DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 16,
    "first_k_dense_replace": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 1,
    "vocab_size": MODEL["vocab_size"],
    "max_position_embeddings": MODEL["max_position_embeddings"],
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
}
"""DeepSeek's V3 with 16 dense layers: latents of 576 values a token and layer. Its MTP module has experts."""

EAGLE3: dict[str, Any] = {
    **MODEL,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": MODEL["vocab_size"],
    "target_hidden_size": MODEL["hidden_size"],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29], "use_aux_hidden_state": True},
}
"""A drafter of one layer for ``MODEL``."""


SPARSE = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
"""Settings that DeepSeek's V3.2 has beside V3: an indexer with keys of its own, which chooses the latents that are
attended."""

GEMMA_3: dict[str, Any] = {
    **MODEL,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 1024,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 8,
    "tie_word_embeddings": True,
}
"""Gemma 3 12B with a smaller vocabulary: five groups of windows, and one of whole sequences."""

GPT_OSS: dict[str, Any] = {
    **MODEL,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "initial_context_length": 4096,
    "swiglu_limit": 7.0,
    "attention_bias": True,
}
"""gpt-oss-120b with 8 experts of 16 bits instead of 128: a group of windows, with sinks, and one of whole sequences."""

QWEN_3_NEXT: dict[str, Any] = {
    **MODEL,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000.0,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 12,
    "num_experts": 32,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
"""Qwen3-Next 80B with 32 experts instead of 512: three groups of states, and one of whole sequences."""

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
SMALL_STATES = {
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


def _first_layers(model: Mapping[str, Any], layers: int, **small: Any) -> dict[str, Any]:
    return {**model, **small, "num_hidden_layers": layers, "layer_types": model["layer_types"][:layers]}


@dataclass(frozen=True)
class Case:
    """``drafter``: its ``config.json``, where it has one of its own; ``speculative``: vLLM's configuration of it.
    ``latent_values``: a token's KV in a layer where that is no key and value; ``engine``: further arguments of
    ``LLM``; ``block_tokens``: of a block."""

    model: Mapping[str, Any]
    backend: str
    drafter: Mapping[str, Any] = field(default_factory=dict)
    speculative: Mapping[str, Any] = field(default_factory=dict)
    latent_values: int = 0
    engine: Mapping[str, Any] = field(default_factory=dict)
    block_tokens: int = 64

    @property
    def draft_layers(self) -> int:
        """Layers of the drafter, which have KV too."""
        return int(self.drafter.get("num_hidden_layers", 1)) if self.speculative else 0

    def options(self, folder: Path) -> dict[str, Any]:
        """Arguments of ``LLM`` beside its model, whose drafter is written below ``folder``."""
        if not self.speculative:
            return dict(self.engine)
        speculative = dict(self.speculative)
        if self.drafter:
            (folder / "drafter").mkdir(parents=True, exist_ok=True)
            (folder / "drafter" / "config.json").write_text(json.dumps(dict(self.drafter)), encoding="utf-8")
            speculative["model"] = str(folder / "drafter")
        return {**self.engine, "speculative_config": speculative, "disable_log_stats": False}


MTP = {"method": "mtp", "num_speculative_tokens": 1}
DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": 3}

HALF = {**MODEL, "num_hidden_layers": 16}

WIDE = {
    **MODEL,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 60,
}
"""The shape of a Llama of 70 billion parameters, with 60 of its 80 layers: two engines fit on four GPUs of 80 GB."""

TRITON_STATES = {"additional_config": {"gdn_prefill_backend": "triton"}}
"""States by the kernels that vLLM brings itself, in Triton; its choice on an H100 is FlashInfer's."""

CASES = {
    "llama-70b": Case(WIDE, "FLASH_ATTN"),
    "llama": Case(MODEL, "FLASH_ATTN"),
    "tiny": Case(TINY, ""),
    "tiny-eagle": Case(TINY, "", {**TINY, "num_hidden_layers": 1}, {"method": "eagle", "num_speculative_tokens": 2}),
    "llama-eagle3": Case(MODEL, "FLASH_ATTN", EAGLE3, {"method": "eagle3", "num_speculative_tokens": 3}),
    "tiny-draft": Case(TINY, "", {**TINY, "num_hidden_layers": 1}, DRAFT_MODEL),
    "llama-draft": Case(HALF, "FLASH_ATTN", {**MODEL, "num_hidden_layers": 8}, DRAFT_MODEL),
    "mla": Case({**DEEPSEEK, "num_nextn_predict_layers": 0}, "FLASH_ATTN_MLA", latent_values=576),
    "mla-mtp": Case(DEEPSEEK, "FLASH_ATTN_MLA", {}, MTP, latent_values=576),
    "dsa": Case({**DEEPSEEK, **SPARSE, "num_nextn_predict_layers": 0}, "FLASHMLA_SPARSE", latent_values=642),
    "dsa-mtp": Case({**DEEPSEEK, **SPARSE}, "FLASHMLA_SPARSE", {}, MTP, latent_values=642),
    "gemma-3": Case(GEMMA_3, "FLASH_ATTN", engine={"max_num_batched_tokens": 8192}),
    "gpt-oss": Case(GPT_OSS, "FLASH_ATTN"),
    "qwen3-next": Case(QWEN_3_NEXT, "FLASH_ATTN", engine=TRITON_STATES),
    "tiny-gemma-3": Case(_first_layers(GEMMA_3, 6, **SMALL, query_pre_attn_scalar=32), ""),
    "tiny-gpt-oss": Case(_first_layers(GPT_OSS, 4, **SMALL), ""),
    "tiny-qwen3-next": Case(_first_layers(QWEN_3_NEXT, 4, **SMALL, **SMALL_STATES), "", block_tokens=288),
}
"""``*-draft``: the drafter is the target's first layers, so that it is right now and then. ``dsa``: 576 values of 16
bits, and 132 bytes of the indexer."""


# Small models of the layers of each family of hybrids, for ``benchmarks.vllm.families``.

_DENSE = {**MODEL, "num_attention_heads": 16, "num_key_value_heads": 4, "hidden_size": 2048, "intermediate_size": 6144}
_GDN = {
    **_first_layers(QWEN_3_NEXT, 8),
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 1,
    "mtp_num_hidden_layers": 1,
}
_MAMBA_2 = {"mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256, "mamba_n_groups": 1}
_NEMOTRON_H = {
    **{name: value for name, value in _DENSE.items() if name != "hidden_act"},
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "num_hidden_layers": 12,
    "hybrid_override_pattern": "M-M-M*-M-M*-",
    "head_dim": 128,
    "attention_head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 128,
    "mlp_hidden_act": "relu2",
    "use_conv_bias": True,
}
_GRANITE_4 = {
    **MODEL,
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "hidden_size": 1536,
    "intermediate_size": 512,
    "shared_intermediate_size": 1024,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 10,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "layer_types": [*["mamba"] * 4, "attention"] * 2,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "position_embedding_type": "nope",
    **_MAMBA_2,
}
_FALCON_H1 = {
    **MODEL,
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "mamba_d_ssm": 2048,
    "mamba_n_heads": 32,
    "mamba_d_head": 64,
    **_MAMBA_2,
}
_BAMBA = {
    **_DENSE,
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "num_hidden_layers": 12,
    "attn_layer_indices": [3, 7, 11],
    "mamba_n_heads": 64,
    "mamba_d_head": 64,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    **_MAMBA_2,
}
_LFM_2 = {
    **MODEL,
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 10,
    "head_dim": 64,
    "conv_L_cache": 3,
    "conv_bias": False,
    "block_ff_dim": 8192,
    "block_multiple_of": 256,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "norm_eps": 1e-5,
    "layer_types": ["conv", "conv", "full_attention", "conv", "conv"] * 2,
}


def _by_n_grams(tokens: int) -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": tokens, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


FAMILIES = {
    "qwen3-next": Case(_GDN, "", engine=TRITON_STATES),
    "qwen3-next-ngram": Case(_GDN, "", {}, _by_n_grams(3), engine=TRITON_STATES),
    "qwen3-next-mtp": Case(_GDN, "", {}, {"method": "mtp", "num_speculative_tokens": 2}, engine=TRITON_STATES),
    "nemotron-h": Case(_NEMOTRON_H, ""),
    "nemotron-h-ngram": Case(_NEMOTRON_H, "", {}, _by_n_grams(2)),
    "granite-4": Case(_GRANITE_4, ""),
    "falcon-h1": Case(_FALCON_H1, ""),
    "bamba": Case(_BAMBA, ""),
    "lfm2": Case(_LFM_2, ""),
    "gemma-3": Case(_first_layers(GEMMA_3, 12), ""),
    "gpt-oss": Case(_first_layers(GPT_OSS, 8), ""),
}
