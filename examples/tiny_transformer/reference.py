"""The oracle: the same transformer in float64, dense, without pages, chunks or absorption. For tests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from examples.tiny_transformer.config import Bool, Group
from examples.tiny_transformer.families import Gqa, Mla
from examples.tiny_transformer.model import TinyTransformer
from examples.tiny_transformer.tokens import Tokens

F64 = npt.NDArray[np.float64]
Head = tuple[F64, F64, F64]  # query, key [n, width] and value [n, value width]


def dense_logits(model: TinyTransformer, tokens: Tokens) -> F64:
    """Logits [vocab] of the last of tokens [n], each attending to all that its group's rule lets it see."""
    config = model.config
    groups = {group.name: group for group in config.groups}
    x = model.weights.embedding[tokens].astype(np.float64)
    for name, layer in zip(config.layer_groups, model.weights.layers, strict=True):
        weights = {key: array.astype(np.float64) for key, array in layer.items()}
        normed = _norm(x, weights["attention_gain"])
        visible = _visible(groups[name], len(x))
        mixed = [_attend(head, visible) for head in _heads(model, normed, weights)]
        x = x + np.concatenate(mixed, axis=-1) @ weights["attention_out"]
        normed = _norm(x, weights["ff_gain"])
        gate = normed @ weights["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ weights["up"])) @ weights["down"]
    logits: F64 = _norm(x, model.weights.final_gain.astype(np.float64))[-1] @ model.weights.unembedding
    return logits


def _visible(group: Group, count: int) -> Bool:
    """[query, key]: True where a group's rule lets a query see a key."""
    visible = np.zeros((count, count), dtype=np.bool_)
    for query in range(count):
        first = 0 if group.window_tokens is None else max(query - group.window_tokens + 1, 0)
        visible[query, first : query + 1] = True
        visible[query, : min(group.sink_tokens, query + 1)] = True
    return visible


def _attend(head: Head, visible: Bool) -> F64:
    query, key, value = head
    scores = np.where(visible, query @ key.T / np.sqrt(query.shape[-1]), -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed: F64 = shares / shares.sum(axis=-1, keepdims=True) @ value
    return mixed


def _heads(model: TinyTransformer, x: F64, weights: dict[str, F64]) -> Iterator[Head]:
    """Every query head with its own full key and value, from normed rows [n, d_model]."""
    family = model.config.attention
    theta = model.config.rope_theta
    if isinstance(family, Gqa):
        yield from _gqa_heads(family, theta, x, weights)
    elif isinstance(family, Mla):
        yield from _mla_heads(family, theta, x, weights)
    else:
        raise TypeError(f"the oracle does not know {family}")


def _gqa_heads(family: Gqa, theta: float, x: F64, weights: dict[str, F64]) -> Iterator[Head]:
    queries = np.split(x @ weights["query"], family.heads, axis=1)
    keys = np.split(x @ weights["key"], family.kv_heads, axis=1)
    values = np.split(x @ weights["value"], family.kv_heads, axis=1)
    for index, query in enumerate(queries):
        shared = index * family.kv_heads // family.heads
        yield _rotate(query, theta), _rotate(keys[shared], theta), values[shared]


def _mla_heads(family: Mla, theta: float, x: F64, weights: dict[str, F64]) -> Iterator[Head]:
    """Expanded: each head's key is unfolded from the latent and set beside the one rotated key."""
    down = x @ weights["latent_down"]
    latent = _norm(down[:, : family.kv_lora_rank], weights["latent_gain"])
    rope_key = _rotate(down[:, family.kv_lora_rank :], theta)
    for index, query in enumerate(np.split(x @ weights["query"], family.heads, axis=1)):
        key = latent @ weights["key_up"][index].T
        rotated = _rotate(query[:, family.nope_dim :], theta)
        yield (
            np.hstack((query[:, : family.nope_dim], rotated)),
            np.hstack((key, rope_key)),
            latent @ weights["value_up"][index],
        )


def _norm(x: F64, gain: F64) -> F64:
    normed: F64 = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * gain
    return normed


def _rotate(x: F64, theta: float) -> F64:
    """Each pair of columns (i, i + half) of row p as a complex number, turned by p * theta ** (-i / half)."""
    half = x.shape[1] // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.hstack((turned.real, turned.imag))
