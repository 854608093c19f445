"""Random but fixed weights: the same config gives the same bytes in every process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from examples.tiny_transformer.arrays import Array, Arrays
from examples.tiny_transformer.config import F32, Layer, Shape, TinyConfig

# Sharper attention than a unit scale gives, so that a single wrong key row changes what is decoded.
QUERY_SCALE = 3.0
DRAFT_SCALE = 0.5  # of the hidden row beside the token: the nearer to the model's own arithmetic, the better it guesses


@dataclass(frozen=True, eq=False)
class Weights:
    """All arrays of a model; each layer is a mapping from weight name to array, the draft's the last."""

    embedding: Array  # [vocab, d_model]
    layers: tuple[dict[str, Array], ...]
    final_gain: Array  # [d_model]
    unembedding: Array  # [d_model, vocab]

    def on(self, arrays: Arrays) -> Weights:
        """The same weights as arrays of a module."""
        layers = tuple({name: arrays.put(array) for name, array in layer.items()} for layer in self.layers)
        return Weights(arrays.put(self.embedding), layers, arrays.put(self.final_gain), arrays.put(self.unembedding))

    def shard(self, config: TinyConfig, rank: int, ranks: int) -> Weights:
        """Weights of one rank: its part of each layer's heads, and all of the rest."""

        def cut(layer: Layer, weights: dict[str, Array]) -> dict[str, Array]:
            parts = {name: np.split(weights[name], ranks)[rank] for name in layer.attention.sharded_weights()}
            return {**weights, **parts}

        layers = tuple(map(cut, config.all_layers, self.layers))
        return Weights(self.embedding, layers, self.final_gain, self.unembedding)


def make_weights(config: TinyConfig) -> Weights:
    """Draw all weights from PCG64(seed), in one fixed order."""
    draw = np.random.Generator(np.random.PCG64(config.seed))
    scales = {
        "query": QUERY_SCALE,
        "attention_out": config.residual_scale,
        "down": config.residual_scale,
        "draft_mix": DRAFT_SCALE,
    }

    def draw_weight(name: str, shape: Shape) -> F32:
        """Gains (one axis) are ones; matrices keep the variance of a row that passes through them."""
        if len(shape) == 1:
            return np.ones(shape, dtype=np.float32)
        scale = shape[-2] ** -0.5 * scales.get(name, 1.0)
        return draw.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    embedding = draw.standard_normal((config.vocab_size, config.d_model), dtype=np.float32)
    layers = [
        {name: draw_weight(name, shape) for name, shape in _shapes(config, each).items()} for each in config.layers
    ]
    if config.draft is not None:
        shapes = {"draft_gain": (config.d_model,), "draft_mix": (config.d_model, config.d_model)}
        shapes |= _shapes(config, config.draft.layer)
        layers.append({name: draw_weight(name, shape) for name, shape in shapes.items()})
    unembedding = draw_weight("unembedding", (config.d_model, config.vocab_size))
    return Weights(embedding, tuple(layers), np.ones(config.d_model, dtype=np.float32), unembedding)


def _shapes(config: TinyConfig, layer: Layer) -> dict[str, Shape]:
    return {
        "attention_gain": (config.d_model,),
        **layer.attention.weight_shapes(config.d_model),
        "ff_gain": (config.d_model,),
        "gate": (config.d_model, config.ff_dim),
        "up": (config.d_model, config.ff_dim),
        "down": (config.ff_dim, config.d_model),
    }
