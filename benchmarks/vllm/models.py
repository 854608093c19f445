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


@dataclass(frozen=True)
class Case:
    """``drafter``: its ``config.json``, where it has one of its own; ``speculative``: vLLM's configuration of it.
    ``latent_values``: a token's KV in a layer where that is no key and value."""

    model: Mapping[str, Any]
    backend: str
    drafter: Mapping[str, Any] = field(default_factory=dict)
    speculative: Mapping[str, Any] = field(default_factory=dict)
    latent_values: int = 0

    @property
    def draft_layers(self) -> int:
        """Layers of the drafter, which have KV too."""
        return int(self.drafter.get("num_hidden_layers", 1)) if self.speculative else 0

    def options(self, folder: Path) -> dict[str, Any]:
        """Arguments of ``LLM`` beside its model, whose drafter is written below ``folder``."""
        if not self.speculative:
            return {}
        speculative = dict(self.speculative)
        if self.drafter:
            (folder / "drafter").mkdir(parents=True, exist_ok=True)
            (folder / "drafter" / "config.json").write_text(json.dumps(dict(self.drafter)), encoding="utf-8")
            speculative["model"] = str(folder / "drafter")
        return {"speculative_config": speculative, "disable_log_stats": False}


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
}
"""``*-draft``: the drafter is the target's first layers, so that it is right now and then. ``dsa``: 576 values of 16
bits, and 132 bytes of the indexer."""
