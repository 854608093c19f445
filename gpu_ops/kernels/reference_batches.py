"""Oracle of a batch's index arrays, in NumPy and plain loops: starts, positions, slots, key ranges, windows.

Row ``b`` has ``added[b]`` new tokens behind ``cached[b]`` cached ones. A window of 0 tokens has no bound; otherwise it
counts the query itself. Written as the rules read, not as the kernels compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from gpu_ops.kernels.batches import EVERYTHING, Reach
from gpu_ops.kernels.operands import Half
from gpu_ops.kernels.reference_keys import unpack_rows
from gpu_ops.kernels.reference_numbers import Codes, HalfBits

Lengths = npt.NDArray[np.int32]
Table = npt.NDArray[np.int32]


def visible(position: int, reach: Reach) -> list[int]:
    """The positions that a query at ``position`` sees, in order."""
    return [
        key
        for key in range(position + 1)
        if not reach.window_tokens or key > position - reach.window_tokens or key < reach.sink_tokens
    ]


def held(cached: int, reach: Reach) -> list[int]:
    """The cached positions that a prefill behind them needs: what its first query sees of them, and every sink."""
    return [key for key in visible(cached, reach) if key < cached]


def cumulate_lengths(added: Lengths, cached: Lengths, reach: Reach = EVERYTHING) -> tuple[Lengths, Lengths, Lengths]:
    """``starts_q``, ``starts_k``, and the largest step of each."""
    kept = np.array([len(held(int(tokens), reach)) for tokens in cached], np.int32)
    steps = (added, added + kept)
    starts = [np.concatenate(([0], np.cumsum(step))).astype(np.int32) for step in steps]
    longest = np.array([step.max(initial=0) for step in steps], np.int32)
    return starts[0], starts[1], longest


def places(starts_q: Lengths, cached: Lengths) -> Iterator[tuple[int, int, int]]:
    """For each new token its number, its row and its position."""
    for row, (begin, end) in enumerate(zip(starts_q[:-1].tolist(), starts_q[1:].tolist(), strict=True)):
        for token in range(begin, end):
            yield token, row, int(cached[row]) + token - begin


def token_positions(starts_q: Lengths, cached: Lengths, tokens: int) -> Lengths:
    """Each new token's position; -1 behind them, up to ``tokens``."""
    out = np.full(tokens, -1, np.int32)
    for token, _, position in places(starts_q, cached):
        out[token] = position
    return out


def page_at(table: Table, row: int, block: int, pages: int) -> int:
    """The page of a row's block, or -1: a hole, beyond the table, no page of the pool."""
    page = int(table[row, block]) if block < table.shape[1] else -1
    return page if 0 <= page < pages else -1


def slot_at(table: Table, row: int, position: int, pages: int, block_tokens: int) -> int:
    """The slot of a row's position, or -1."""
    block, place = divmod(position, block_tokens)
    page = page_at(table, row, block, pages)
    return page * block_tokens + place if page >= 0 else -1


def token_slots(
    starts_q: Lengths, cached: Lengths, table: Table, pages: int, block_tokens: int, tokens: int
) -> npt.NDArray[np.int64]:
    """Each new token's slot; -1 behind them, up to ``tokens``."""
    out = np.full(tokens, -1, np.int64)
    for token, row, position in places(starts_q, cached):
        out[token] = slot_at(table, row, position, pages, block_tokens)
    return out


def key_ranges(starts_q: Lengths, starts_k: Lengths, tokens: int) -> tuple[Lengths, Lengths]:
    """Gathered keys that each new token may see, [begin, end): the last new token sees all of its row."""
    begins, ends = np.full((2, tokens), -1, np.int32)
    for row in range(len(starts_q) - 1):
        for token in range(int(starts_q[row]), int(starts_q[row + 1])):
            begins[token] = starts_k[row]
            ends[token] = starts_k[row + 1] - (starts_q[row + 1] - 1 - token)
    return begins, ends


def window_rows_paged(
    starts_q: Lengths,
    cached: Lengths,
    table: Table,
    reach: Reach,
    shape: tuple[int, int],
    pages: int,
    block_tokens: int,
) -> Table:
    """The pool's rows that each new token sees; ``shape``: tokens and width."""
    out = np.full((shape[0], 1, shape[1]), -1, np.int32)
    for token, row, position in places(starts_q, cached):
        wanted = [slot_at(table, row, key, pages, block_tokens) for key in visible(position, reach)]
        out[token, 0, : len(wanted)] = wanted
    return out


def window_rows_gathered(
    starts_q: Lengths, starts_k: Lengths, cached: Lengths, reach: Reach, shape: tuple[int, int]
) -> Table:
    """The same as rows of what ``gather`` returns with the same reach."""
    out = np.full((shape[0], 1, shape[1]), -1, np.int32)
    for token, row, position in places(starts_q, cached):
        before = int(cached[row])
        new = range(before, before + int(starts_q[row + 1] - starts_q[row]))
        order = {key: at for at, key in enumerate([*held(before, reach), *new])}
        wanted = [int(starts_k[row]) + order[key] for key in visible(position, reach)]
        out[token, 0, : len(wanted)] = wanted
    return out


def gather_latents(
    pool: HalfBits,
    latent: HalfBits,
    rope: HalfBits,
    table: Table,
    starts_q: Lengths,
    starts_k: Lengths,
    cached: Lengths | None = None,
    reach: Reach = EVERYTHING,
) -> tuple[HalfBits, HalfBits]:
    """Cached and new keys of ``[pages, 1, block_tokens, latent + rope]``, row by row; zeros for holes."""
    rows = np.zeros((int(starts_k[-1]), pool.shape[3]), pool.dtype)
    new = np.concatenate([latent, rope], axis=1)
    for row in range(len(starts_q) - 1):
        added = int(starts_q[row + 1] - starts_q[row])
        before = int(starts_k[row + 1] - starts_k[row]) - added
        keys = range(before) if cached is None else held(int(cached[row]), reach)
        assert len(keys) == before
        for at, key in enumerate(keys):
            block, place = divmod(key, pool.shape[2])
            page = page_at(table, row, block, len(pool))
            if page >= 0:
                rows[starts_k[row] + at] = pool[page, 0, place]
        rows[starts_k[row] + before : starts_k[row + 1]] = new[starts_q[row] : starts_q[row + 1]]
    return rows[:, : latent.shape[1]], rows[:, latent.shape[1] :]


def unpack_pool(pool: Codes, latent_values: int, half: Half) -> HalfBits:
    """A pool of packed rows as one of sixteen-bit floats: what is gathered from the one is gathered from the other."""
    pages, _, tokens, width = pool.shape
    latent, rope = unpack_rows(pool.reshape(-1, width), latent_values, half)
    return np.concatenate([latent, rope], axis=1).reshape(pages, 1, tokens, -1)


def expand_tables(tables: Sequence[Table], group_of_head: Sequence[int], width: int) -> Table:
    """Row ``b * heads + h`` is head ``h``'s group's row ``b``, with -1 behind its end."""
    batch = len(tables[0])
    out = np.full((batch, len(group_of_head), width), -1, np.int32)
    for head, group in enumerate(group_of_head):
        out[:, head, : tables[group].shape[1]] = tables[group]
    return out.reshape(batch * len(group_of_head), width)
