"""Checkpoints of random weights for the tests' model, and adapters for it, written without torch.

vLLM's dummy weights are the same on each rank, so that ranks could be mistaken for each other; these are not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

SCALE = 0.05


def write_checkpoint(folder: Path, config: Mapping[str, Any], seed: int) -> None:
    """A Llama's weights beside its ``config.json``, those of a Gemma 3 or 4, which have more norms, or of a DeepSeek-V2
    without experts."""
    hidden, between, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        stem, mine = f"model.layers.{layer}", _config_of(config, layer)
        shapes |= {f"{stem}.{name}.weight": shape for name, shape in projection_shapes(mine).items()}
        shapes |= {
            f"{stem}.mlp.gate_proj.weight": (between, hidden),
            f"{stem}.mlp.up_proj.weight": (between, hidden),
            f"{stem}.mlp.down_proj.weight": (hidden, between),
            f"{stem}.input_layernorm.weight": (hidden,),
            f"{stem}.post_attention_layernorm.weight": (hidden,),
        }
        if "kv_lora_rank" in config:
            shapes[f"{stem}.self_attn.kv_a_layernorm.weight"] = (config["kv_lora_rank"],)
        if config["model_type"] in ("gemma3_text", "gemma4_text"):
            shapes |= {
                f"{stem}.pre_feedforward_layernorm.weight": (hidden,),
                f"{stem}.post_feedforward_layernorm.weight": (hidden,),
                f"{stem}.self_attn.q_norm.weight": (mine["head_dim"],),
                f"{stem}.self_attn.k_norm.weight": (mine["head_dim"],),
            }
    _write(folder / "model.safetensors", shapes, seed)


def _config_of(config: Mapping[str, Any], layer: int) -> Mapping[str, Any]:
    """The same for a layer, whose heads are others where it has a window and ``config`` says so."""
    if "swa_head_dim" not in config or config["layer_types"][layer] != "sliding_attention":
        return config
    return {**config, "head_dim": config["swa_head_dim"], "num_key_value_heads": config["swa_num_key_value_heads"]}


def write_adapter(folder: Path, config: Mapping[str, Any], seed: int, rank: int = 8) -> None:
    """A LoRA adapter of attention's projections."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (rows, columns) in projection_shapes(config).items():
            stem = f"base_model.model.model.layers.{layer}.{name}"
            shapes |= {f"{stem}.lora_A.weight": (rank, columns), f"{stem}.lora_B.weight": (rows, rank)}
    _write(folder / "adapter_model.safetensors", shapes, seed)
    told = {
        "peft_type": "LORA",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": 64 * rank,
        "target_modules": sorted(name.rpartition(".")[2] for name in projection_shapes(config)),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(told), encoding="utf-8")


def projection_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    if "kv_lora_rank" in config:
        return _latent_shapes(config)
    hidden, width = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    shapes = {"q_proj": (heads, hidden), "k_proj": (kv_heads, hidden), "v_proj": (kv_heads, hidden)}
    return {f"self_attn.{name}": shape for name, shape in {**shapes, "o_proj": (hidden, heads)}.items()}


def _latent_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, rotated, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    shapes = {
        "q_proj": (heads * (plain + rotated), hidden),
        "kv_a_proj_with_mqa": (rank + rotated, hidden),
        "kv_b_proj": (heads * (plain + value), rank),
        "o_proj": (hidden, heads * value),
    }
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _write(path: Path, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    write_tensors(
        path, {name: rng.normal(1.0 if len(shape) == 1 else 0.0, SCALE, shape) for name, shape in shapes.items()}
    )


def write_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """In the format of safetensors: a length, names and places in JSON, and the bytes, as bfloat16."""
    header, parts, offset = {}, [], 0
    for name, tensor in tensors.items():
        values = np.ascontiguousarray(tensor, np.float32)
        parts.append((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())  # bfloat16: the upper half
        header[name] = {"dtype": "BF16", "shape": values.shape, "data_offsets": [offset, offset + len(parts[-1])]}
        offset += len(parts[-1])
    told = json.dumps(header).encode()
    path.write_bytes(len(told).to_bytes(8, "little") + told + b"".join(parts))
