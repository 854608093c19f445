"""The oracle of rows, windows and gathered latents, against vectors written out by hand and against a dense mask."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops.kernels.batches import EVERYTHING, Reach
from gpu_ops.kernels.operands import Half
from gpu_ops.kernels.reference_attention import decode_attention
from gpu_ops.kernels.reference_batches import (
    cumulate_lengths,
    expand_tables,
    gather_latents,
    held,
    key_ranges,
    slot_at,
    token_positions,
    token_slots,
    visible,
    window_rows_gathered,
    window_rows_paged,
)
from gpu_ops.kernels.reference_numbers import narrow, widen


def ints(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(numbers, np.int32)


def test_cached_and_new_latents_of_two_rows() -> None:
    """Blocks of 2; row 0 has 3 cached and 2 new, row 1 has 4 new: 0 to 2 from pages, 3 and 4 new 0 and 1, 5 to 8 new 2
    to 5."""
    starts_q, starts_k, longest = cumulate_lengths(ints(2, 4), ints(3, 0))
    assert (starts_q.tolist(), starts_k.tolist(), longest.tolist()) == ([0, 2, 6], [0, 5, 9], [4, 5])
    pool = np.arange(4 * 2 * 3, dtype=np.uint16).reshape(4, 1, 2, 3) + 100
    new = np.arange(6 * 3, dtype=np.uint16).reshape(6, 3)
    table = np.array([[2, 1], [-1, -1]], np.int32)
    latent, rope = gather_latents(pool, new[:, :2], new[:, 2:], table, starts_q, starts_k)
    rows = np.concatenate([latent, rope], axis=1)
    np.testing.assert_array_equal(rows[:3], [pool[2, 0, 0], pool[2, 0, 1], pool[1, 0, 0]])
    np.testing.assert_array_equal(rows[3:], new)


def test_positions_go_on_behind_cached_tokens_and_empty_rows_have_none() -> None:
    starts_q, starts_k, _ = cumulate_lengths(ints(2, 0, 3, 1), ints(5, 9, 0, 64))
    assert token_positions(starts_q, ints(5, 9, 0, 64), 8).tolist() == [5, 6, 0, 1, 2, 64, -1, -1]
    begins, ends = key_ranges(starts_q, starts_k, 7)
    assert begins.tolist() == [0, 0, 16, 16, 16, 19, -1]
    assert ends.tolist() == [6, 7, 17, 18, 19, 19 + 65, -1]
    table = np.array([[7, 3], [0, 0], [1, -1], [-1, 2]], np.int32)
    slots = token_slots(starts_q, ints(5, 9, 0, 64), table, 8, 6, 7)
    assert slots.tolist() == [7 * 6 + 5, 3 * 6, 6, 7, 8, -1, -1]


def test_a_window_counts_the_query_and_sinks_are_named_once() -> None:
    assert visible(5, Reach(3)) == [3, 4, 5]
    assert visible(1, Reach(3)) == [0, 1]
    assert visible(9, Reach(3, 2)) == [0, 1, 7, 8, 9]
    assert visible(3, Reach(3, 2)) == [0, 1, 2, 3]
    assert visible(2, EVERYTHING) == [0, 1, 2]
    assert held(5, Reach(3)) == [3, 4]
    assert held(5, Reach(1)) == []
    assert held(9, Reach(3, 2)) == [0, 1, 7, 8]


@pytest.mark.parametrize("block_tokens", [16, 32, 64, 128])
def test_rows_of_a_window_are_those_of_a_dense_mask(block_tokens: int) -> None:
    rng = np.random.default_rng(block_tokens)
    for reach in (Reach(1), Reach(50), Reach(64, 3), Reach(10, 200)):
        added, cached = ints(3, 40, 0, 1), ints(150, 0, 9, 77)
        starts_q, _, _ = cumulate_lengths(added, cached, reach)
        table = rng.permutation(60).reshape(4, 15).astype(np.int32)
        table[0, 1] = -1
        width = reach.window_tokens + reach.sink_tokens + 3
        paged = window_rows_paged(starts_q, cached, table, reach, (44, width), 60, block_tokens)
        for row, local in ((0, 2), (1, 39), (3, 0)):
            position = int(cached[row]) + local
            query, key = np.meshgrid([position], np.arange(position + 1), indexing="ij")
            mask = (key > query - reach.window_tokens) | (key < reach.sink_tokens)
            want = [slot_at(table, row, int(at), 60, block_tokens) for at in np.flatnonzero(mask[0])]
            found = paged[starts_q[row] + local, 0]
            assert found[: len(want)].tolist() == want
            assert (found[len(want) :] == -1).all()


def test_chunks_behind_a_window_read_the_same_keys_as_one_prefill() -> None:
    """Through the gathered buffer, for every way to cut a prompt in two, and chunks smaller than the window."""
    for reach in (Reach(4), Reach(3, 2), Reach(1), Reach(2, 9)):
        tokens, block_tokens = 11, 2
        pool = np.arange(6 * block_tokens * 2, dtype=np.uint16).reshape(6, 1, block_tokens, 2)
        table = np.array([[4, 0, 5, 1, 3, 2]], np.int32)
        in_order = pool[table[0], 0].reshape(-1, 2)
        for cached in range(tokens):
            new = in_order[cached:tokens]
            starts_q, starts_k, _ = cumulate_lengths(ints(len(new)), ints(cached), reach)
            halves = (new[:, :1], new[:, 1:])
            latent, rope = gather_latents(pool, *halves, table, starts_q, starts_k, ints(cached), reach)
            rows = window_rows_gathered(starts_q, starts_k, ints(cached), reach, (len(new), 16))
            for at in range(len(new)):
                named = rows[at, 0][rows[at, 0] >= 0]
                want = in_order[visible(cached + at, reach)]
                np.testing.assert_array_equal(np.concatenate([latent, rope], axis=1)[named], want)


def test_tables_of_groups_become_those_of_heads() -> None:
    full, window = np.array([[1, 2, 3], [4, 5, 6]], np.int32), np.array([[-1, 9], [-1, 8]], np.int32)
    found = expand_tables([full, window], [1, 0, 1], 4)
    want = [[-1, 9, -1, -1], [1, 2, 3, -1], [-1, 9, -1, -1], [-1, 8, -1, -1], [4, 5, 6, -1], [-1, 8, -1, -1]]
    assert found.tolist() == want


def test_attention_is_that_of_a_dense_mask_and_page_0_is_never_read() -> None:
    rng = np.random.default_rng(3)
    length, width, block_tokens = 70, 8, 16
    shape = (8, 2, block_tokens, width)
    keys, values = (narrow(rng.standard_normal(shape).astype(np.float32), Half.BF16) for _ in range(2))
    keys[0] = values[0] = 0x7FC0
    tables = np.array([[5, 1, 7, 2, 3]], np.int32)
    queries = narrow(rng.standard_normal((1, 4, width)).astype(np.float32), Half.BF16)
    reaches = [EVERYTHING, Reach(20, 3)]
    tables[0, 1] = -1  # beyond both rules' reach for head 1, a hole for head 0
    found, slack = decode_attention(queries, keys, values, tables, [0, 0], reaches, ints(length), 0.5)
    at = np.arange(length)
    there = (at < 16) | (at >= 32)
    masks = [there, there & ((at > length - 1 - 20) | (at < 3))]
    lined = [widen(plane, Half.BF16)[np.maximum(tables[0], 1)] for plane in (keys, values)]
    for head in range(4):
        key, value = (plane[:, head // 2].reshape(-1, width)[:length] for plane in lined)
        scores = np.where(masks[head // 2], key @ widen(queries, Half.BF16)[0, head] * 0.5, -np.inf)
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(found[0, head], weights @ value / weights.sum(), rtol=1e-5, atol=1e-6)
    assert (slack < 0.1).all()
