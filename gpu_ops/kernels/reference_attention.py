"""Decode attention over paged keys and values in NumPy, in fp64, and how far fp32 and bf16 may be from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gpu_ops.kernels.batches import Reach
from gpu_ops.kernels.operands import Half
from gpu_ops.kernels.reference_batches import Lengths, Table, slot_at, visible
from gpu_ops.kernels.reference_numbers import HalfBits, widen

Exact = npt.NDArray[np.float64]
ROUNDINGS = 3 * 2.0**-8
"""A weight and a result are each rounded to bf16, half of 2^-7 relative; scores and sums in fp32 take far less."""
SMALLEST = 1e-30


def decode_attention(
    queries: HalfBits,
    keys: HalfBits,
    values: HalfBits,
    tables: Table,
    table_of_head: Sequence[int],
    reach_of_head: Sequence[Reach],
    lengths: Lengths,
    scale: float,
) -> tuple[Exact, Exact]:
    """Output of each query head, and its bound on the error of bf16. Zeros where nothing is visible."""
    pages, kv_heads, block_tokens, _ = keys.shape
    group = queries.shape[1] // kv_heads
    each = max(table_of_head) + 1
    out, slack = np.zeros((2, *queries.shape))
    for sequence, head in np.ndindex(len(queries), kv_heads):
        row = sequence * each + table_of_head[head]
        seen = visible(int(lengths[sequence]) - 1, reach_of_head[head])
        slots = np.array([slot_at(tables, row, key, pages, block_tokens) for key in seen], np.int64)
        page, place = np.divmod(slots[slots >= 0], block_tokens)
        if not len(page):
            continue
        key, value = (widen(plane[page, head, place], Half.BF16).astype(np.float64) for plane in (keys, values))
        own = slice(head * group, (head + 1) * group)
        scores = widen(queries[sequence, own], Half.BF16).astype(np.float64) @ key.T * scale
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[sequence, own] = weights @ value
        slack[sequence, own] = ROUNDINGS * (weights @ np.abs(value)) + SMALLEST
    return out, slack
