"""The arithmetic of a transformer on float32 rows. No function mixes rows."""

from __future__ import annotations

import numpy as np

from examples.tiny_transformer.config import F32, Bool

NORM_EPSILON = np.float32(1e-5)


def rms_norm(x: F32, gain: F32) -> F32:
    """Each row of [..., width] scaled to a mean square of 1, then by gain [width]."""
    root: F32 = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + NORM_EPSILON)
    return x / root * gain


def rope_tables(rope_dim: int, positions: int, theta: float) -> tuple[F32, F32]:
    """Cosines and sines [positions, rope_dim / 2] of RoPE; worked out in float64 and rounded once."""
    half = rope_dim // 2
    frequencies = theta ** (-np.arange(half, dtype=np.float64) / half)
    angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: F32, cos: F32, sin: F32) -> F32:
    """Rows [..., T, rope_dim] turned by angles [T, rope_dim / 2]; column i pairs with i + rope_dim / 2."""
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    return np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def swiglu(x: F32, gate: F32, up: F32, down: F32) -> F32:
    """Feed-forward of rows [T, d_model]; gate and up are [d_model, ff_dim], down is [ff_dim, d_model]."""
    gated: F32 = x @ gate
    gated /= np.float32(1) + np.exp(-gated)
    gated *= x @ up
    return gated @ down


def masked_softmax(scores: F32, hidden: Bool) -> F32:
    """Softmax over the last axis of [..., T, keys], in place; a key hidden [T, keys] weighs exactly 0.

    Each row must see at least one key.
    """
    np.copyto(scores, np.float32(-np.inf), where=hidden)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores
