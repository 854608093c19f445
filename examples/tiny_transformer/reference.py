"""The oracle: the same transformer in float64, dense, without pages, chunks or absorption. For tests.

Rows of bytes are rounded as the pages have them, by a search of its own, and top-k is a sort of each query's keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from examples.tiny_transformer.config import Attention, Bool, Group, Layer, TinyConfig
from examples.tiny_transformer.families import Gqa, Mla
from examples.tiny_transformer.model import TinyTransformer
from examples.tiny_transformer.packed import Dsa, PackedMla, ScaledGqa
from examples.tiny_transformer.tokens import BYTE_COUNT, Tokens

F64 = npt.NDArray[np.float64]
LayerWeights = dict[str, F64]


def dense_logits(model: TinyTransformer, tokens: Tokens) -> F64:
    """Logits [vocab] of the last of tokens [n], each attending to all that its group's rule lets it see."""
    return _unembed(model, dense_hidden(model, tokens))


def dense_guess(model: TinyTransformer, tokens: Tokens) -> F64:
    """The draft layer's logits [vocab] of what follows the last of tokens [n], which the other layers never saw."""
    draft, weights = model.config.draft, _widen(model.weights.layers[-1])
    assert draft is not None
    before = dense_hidden(model, tokens[:-1]) if len(tokens) > 1 else np.zeros((0, model.config.d_model))
    before = np.vstack((np.zeros((1, model.config.d_model)), before))
    x = model.weights.embedding[tokens] + _norm(before, weights["draft_gain"]) @ weights["draft_mix"]
    return _unembed(model, _run_layer(model.config, draft.layer, weights, x))


def dense_generate(model: TinyTransformer, prompt: Tokens, new_tokens: int) -> list[int]:
    """Greedy decoding, everything anew for each token."""
    tokens = prompt
    for _ in range(new_tokens):
        tokens = np.append(tokens, np.int32(np.argmax(dense_logits(model, tokens)[:BYTE_COUNT])))
    return [int(token) for token in tokens[len(prompt) :]]


def dense_hidden(model: TinyTransformer, tokens: Tokens) -> F64:
    """Rows [n, d_model] behind the last layer."""
    x: F64 = model.weights.embedding[tokens].astype(np.float64)
    for layer, weights in zip(model.config.layers, model.weights.layers, strict=False):
        x = _run_layer(model.config, layer, _widen(weights), x)
    return x


def _run_layer(config: TinyConfig, layer: Layer, weights: LayerWeights, x: F64) -> F64:
    groups = {group.name: group for group in config.groups}
    normed = _norm(x, weights["attention_gain"])
    mixed = []
    for kv_head, query, key, value in _heads(layer.attention, config.rope_theta, normed, weights):
        visible = _visible(groups[layer.head_groups[kv_head]], len(x))
        if isinstance(layer.attention, Dsa):
            visible = _best(layer.attention, normed, weights, visible)
        scores = np.where(visible, query @ key.T / np.sqrt(query.shape[-1]), -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed.append(shares / shares.sum(axis=-1, keepdims=True) @ value)
    x = x + np.concatenate(mixed, axis=-1) @ weights["attention_out"]
    normed = _norm(x, weights["ff_gain"])
    gate = normed @ weights["gate"]
    added: F64 = x + (gate / (1 + np.exp(-gate)) * (normed @ weights["up"])) @ weights["down"]
    return added


def _visible(group: Group, count: int) -> Bool:
    """[query, key]: True where a group's rule lets a query see a key."""
    visible = np.zeros((count, count), dtype=np.bool_)
    for query in range(count):
        first = 0 if group.window_tokens is None else max(query - group.window_tokens + 1, 0)
        visible[query, first : query + 1] = True
        visible[query, : min(group.sink_tokens, query + 1)] = True
    return visible


def _best(family: Dsa, x: F64, weights: LayerWeights, visible: Bool) -> Bool:
    """Reduce the visible keys to each query's top_k by the indexer's score."""
    keys = _round_rows(x @ weights["index_key"], least_largest=1e-4)
    best = np.zeros_like(visible)
    for query in range(len(x)):
        gates = x[query] @ weights["index_gate"]
        products = np.array([keys @ (x[query] @ head) for head in weights["index_query"]])
        scores = gates @ np.maximum(products, 0)
        seen = sorted(np.flatnonzero(visible[query]), key=lambda key: (-scores[key], key))
        best[query, seen[: family.top_k]] = True
    return best


def _heads(family: Attention, theta: float, x: F64, weights: LayerWeights) -> Iterator[tuple[int, F64, F64, F64]]:
    """Every query head with the kv head that it shares, its own query, full key [n, width] and value."""
    if isinstance(family, Gqa):
        for index, query in enumerate(weights["query"]):
            shared = index * family.kv_heads // family.heads
            key, value = _rotate(x @ weights["key"][shared], theta), x @ weights["value"][shared]
            if isinstance(family, ScaledGqa):
                key, value = _round_rows(key), _round_rows(value)
            yield shared, _rotate(x @ query, theta), key, value
    elif isinstance(family, Mla):
        yield from _mla_heads(family, theta, x, weights)
    else:
        raise TypeError(f"the oracle does not know {family}")


def _mla_heads(family: Mla, theta: float, x: F64, weights: LayerWeights) -> Iterator[tuple[int, F64, F64, F64]]:
    """Expanded: each head's key is unfolded from the latent and set beside the one rotated key."""
    down = x @ weights["latent_down"]
    latent = _norm(down[:, : family.kv_lora_rank], weights["latent_gain"])
    rope_key = _rotate(down[:, family.kv_lora_rank :], theta)
    if isinstance(family, PackedMla):
        latent = _round_rows(latent.reshape(len(x), -1, 128)).reshape(latent.shape)
        rope_key = _round_mantissa(rope_key, 8)
    for index, weight in enumerate(weights["query"]):
        query = x @ weight
        key = latent @ weights["key_up"][index].T
        rotated = _rotate(query[:, family.nope_dim :], theta)
        yield (
            0,
            np.hstack((query[:, : family.nope_dim], rotated)),
            np.hstack((key, rope_key)),
            latent @ weights["value_up"][index],
        )


def nearest_fp8(values: F64) -> F64:
    """Each value's nearest e4m3fn value, by a look at all of them; of two equally near ones the one with even code."""
    magnitudes = [
        (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
        for exponent in range(16)
        for mantissa in range(8)
    ][:127]
    grid = np.array([value for pair in (magnitudes[::2], magnitudes[1::2]) for value in pair])  # even codes first
    nearest = np.empty_like(values)
    for place, value in np.ndenumerate(values):
        nearest[place] = np.copysign(grid[np.argmin(np.abs(grid - abs(value)))], value)
    return nearest


def _round_rows(rows: F64, least_largest: float = 0.0) -> F64:
    """Round rows [..., n] as fp8 would, each with a scale of its own."""
    scale = np.maximum(np.abs(rows).max(axis=-1, keepdims=True), least_largest) / 448
    rounded: F64 = nearest_fp8(rows / scale) * scale
    return rounded


def _round_mantissa(values: F64, bits: int) -> F64:
    """Rounded to ``bits`` binary digits: bfloat16 has 8."""
    fraction, exponent = np.frexp(values)
    rounded: F64 = np.ldexp(np.rint(fraction * 2**bits) / 2**bits, exponent)
    return rounded


def _unembed(model: TinyTransformer, x: F64) -> F64:
    logits: F64 = _norm(x, model.weights.final_gain.astype(np.float64))[-1] @ model.weights.unembedding
    return logits


def _widen(weights: dict[str, npt.NDArray[np.float32]]) -> LayerWeights:
    return {name: array.astype(np.float64) for name, array in weights.items()}


def _norm(x: F64, gain: F64) -> F64:
    normed: F64 = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * gain
    return normed


def _rotate(x: F64, theta: float) -> F64:
    """Each pair of columns (i, i + half) of row p as a complex number, turned by p * theta ** (-i / half)."""
    half = x.shape[1] // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.hstack((turned.real, turned.imag))
