"""Random but fixed weights: the same config gives the same bytes in every process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from examples.tiny_transformer.config import F32, Shape, TinyConfig

# Sharper attention than a unit scale gives, so that a single wrong key row changes what is decoded.
QUERY_SCALE = 3.0


@dataclass(frozen=True, eq=False)
class Weights:
    """All arrays of a model; each layer is a mapping from weight name to array."""

    embedding: F32  # [vocab, d_model]
    layers: tuple[dict[str, F32], ...]
    final_gain: F32  # [d_model]
    unembedding: F32  # [d_model, vocab]


def make_weights(config: TinyConfig) -> Weights:
    """Draw all weights from PCG64(seed), in one fixed order."""
    draw = np.random.Generator(np.random.PCG64(config.seed))
    shapes = _layer_shapes(config)
    return Weights(
        embedding=draw.standard_normal((config.vocab_size, config.d_model), dtype=np.float32),
        layers=tuple(
            {name: _draw_weight(draw, name, shape) for name, shape in shapes.items()} for _ in config.layer_groups
        ),
        final_gain=np.ones(config.d_model, dtype=np.float32),
        unembedding=_draw_weight(draw, "unembedding", (config.d_model, config.vocab_size)),
    )


def _layer_shapes(config: TinyConfig) -> dict[str, Shape]:
    return {
        "attention_gain": (config.d_model,),
        **config.attention.weight_shapes(config.d_model),
        "ff_gain": (config.d_model,),
        "gate": (config.d_model, config.ff_dim),
        "up": (config.d_model, config.ff_dim),
        "down": (config.ff_dim, config.d_model),
    }


def _draw_weight(draw: np.random.Generator, name: str, shape: Shape) -> F32:
    """Gains (one axis) are ones; matrices keep the variance of a row that passes through them."""
    if len(shape) == 1:
        return np.ones(shape, dtype=np.float32)
    scale = shape[-2] ** -0.5 * (QUERY_SCALE if name == "query" else 1.0)
    return draw.standard_normal(shape, dtype=np.float32) * np.float32(scale)
