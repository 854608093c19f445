"""A tiny model with sliding windows beside whole sequences, as SGLang serves it from two pools: a Gemma 4."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.sglang.rig import SglangFleet, forker
from tests.vllm.rig import BLOCK_TOKENS, MODEL, Engine
from tests.vllm.weights import write_checkpoint

WINDOW_TOKENS = 2 * BLOCK_TOKENS + 1

WINDOWS: dict[str, Any] = {
    **MODEL,
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "num_hidden_layers": 5,
    "hidden_activation": "gelu_pytorch_tanh",
    "global_head_dim": 32,
    "v_head_dim": 32,
    "swa_head_dim": 64,
    "swa_v_head_dim": 64,
    "swa_num_key_value_heads": 1,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 0,
    "sliding_window": WINDOW_TOKENS,
    "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
"""Three layers with windows and two without, whose heads differ."""


class WindowsFleet:
    """Makes engines of the model, whose weights are saved in ``folder``."""

    def __init__(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(WINDOWS), encoding="utf-8")
        write_checkpoint(folder, WINDOWS, seed=5)
        self._fleet = SglangFleet(folder, forker())

    def engine(
        self,
        socket_path: str | None,
        blocks: int,
        *,
        window_part: float = 0.5,
        variables: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Engine:
        """An engine that starts, as of ``SglangFleet``. ``window_part``: blocks of the pool of windows, as a part of
        the other one's."""
        given = {"attention_backend": "triton", "swa_full_tokens_ratio": window_part, **options}
        return self._fleet.engine(socket_path, blocks, options=given, variables=variables)
