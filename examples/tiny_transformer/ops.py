"""The arithmetic of a transformer on float32 rows. No function mixes rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from examples.tiny_transformer.arrays import Array, Arrays
from examples.tiny_transformer.config import F32

NORM_EPSILON = 1e-5


def rms_norm(xp: Any, x: Array, gain: Array) -> Array:
    """Each row of [..., width] scaled to a mean square of 1, then by gain [width]."""
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + NORM_EPSILON) * gain


def rope_tables(rope_dim: int, positions: int, theta: float) -> tuple[F32, F32]:
    """Cosines and sines [positions, rope_dim / 2] of RoPE; worked out in float64 and rounded once."""
    half = rope_dim // 2
    frequencies = theta ** (-np.arange(half, dtype=np.float64) / half)
    angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(xp: Any, x: Array, cos: Array, sin: Array) -> Array:
    """Rows [..., T, rope_dim] turned by angles [T, rope_dim / 2]; column i pairs with i + rope_dim / 2."""
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    return xp.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def swiglu(xp: Any, x: Array, gate: Array, up: Array, down: Array) -> Array:
    """Feed-forward of rows [T, d_model]; gate and up are [d_model, ff_dim], down is [ff_dim, d_model]."""
    gated = x @ gate
    return gated / (1.0 + xp.exp(-gated)) * (x @ up) @ down


def masked_softmax(xp: Any, scores: Array, hidden: Array) -> Array:
    """Softmax over the last axis of [..., T, keys]; a key that ``hidden`` marks, of a like shape, weighs exactly 0.

    Each row must see at least one key.
    """
    scores = xp.where(hidden, float("-inf"), scores)
    shares = xp.exp(scores - xp.amax(scores, axis=-1, keepdims=True))
    return shares / xp.sum(shares, axis=-1, keepdims=True)


def join_heads(x: Array) -> Array:
    """[heads, T, width] to [T, heads * width]."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def lanes_first(arrays: Arrays, queries: Array) -> Array:
    """[n, query heads, lanes * T, width] to [lanes * n, query heads, T, width]."""
    heads, each, rows, width = queries.shape
    lanes = queries.reshape(heads, each, arrays.lanes, rows // arrays.lanes, width)
    return arrays.xp.moveaxis(lanes, 2, 0).reshape(arrays.lanes * heads, each, -1, width)


def lanes_last(arrays: Arrays, mixed: Array) -> Array:
    """The way back: [lanes * n, query heads, T, width] to [n, query heads, lanes * T, width]."""
    lanes_heads, each, rows, width = mixed.shape
    lanes = mixed.reshape(arrays.lanes, lanes_heads // arrays.lanes, each, rows, width)
    return arrays.xp.moveaxis(lanes, 0, 2).reshape(lanes_heads // arrays.lanes, each, -1, width)


def hidden_of_heads(arrays: Arrays, hidden: Array, heads: int) -> Array:
    """[lanes, T, keys] for each of the heads that one lane has: [lanes * heads, T, keys]."""
    lanes, rows, keys = hidden.shape
    return arrays.xp.broadcast_to(hidden[:, None], (lanes, heads, rows, keys)).reshape(-1, rows, keys)
