"""Checkpoints of a target and of an EAGLE drafter that often guesses rightly, without training.

The target's layers add little to a token's embedding, so that what follows depends on the last token most and on all
others a little. The drafter passes the next token's embedding through and has a layer of its own that adds as little:
it mostly agrees with the target, and what it guesses depends on its KV.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.vllm.weights import projection_shapes, write_tensors

QUIET = 0.02
"""Scale of what layers add."""


def write_drafting_checkpoints(target: Path, drafter: Path, model: Mapping[str, Any]) -> None:
    """Weights and ``config.json`` of both."""
    rng = np.random.default_rng(3)
    hidden, vocabulary = model["hidden_size"], model["vocab_size"]
    embedding = rng.normal(0, 1, (vocabulary, hidden))
    following = embedding[rng.permutation(vocabulary)]  # the token that a token asks for
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(hidden),
        "lm_head.weight": following,
    }
    for layer in range(model["num_hidden_layers"]):
        tensors |= _layer(rng, model, f"model.layers.{layer}")
    _write(target, model, tensors)
    passing = np.concatenate([np.eye(hidden), np.zeros((hidden, hidden))], axis=1)  # of [embedding, hidden state]
    drafts = {"fc.weight": passing, **_layer(rng, model, "layers.0")}
    del drafts["layers.0.input_layernorm.weight"]  # EAGLE's first layer has none
    _write(drafter, {**model, "num_hidden_layers": 1}, drafts)


def _layer(rng: np.random.Generator, model: Mapping[str, Any], stem: str) -> dict[str, Any]:
    hidden, between = model["hidden_size"], model["intermediate_size"]
    shapes = {f"{stem}.{name}.weight": shape for name, shape in projection_shapes(model).items()}
    shapes |= {f"{stem}.mlp.{name}_proj.weight": (between, hidden) for name in ("gate", "up")}
    shapes |= {f"{stem}.mlp.down_proj.weight": (hidden, between)}
    quiet = ("o_proj.weight", "down_proj.weight")
    tensors: dict[str, Any] = {
        name: rng.normal(0, QUIET if name.endswith(quiet) else 0.1, shape) for name, shape in shapes.items()
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{stem}.{name}.weight"] = np.ones(hidden)
    return tensors


def _write(folder: Path, model: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
    write_tensors(folder / "model.safetensors", tensors)
