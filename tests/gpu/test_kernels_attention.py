"""Decode attention against fp64, with holes and poison where it may not look."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gpu_ops.kernels.batches import EVERYTHING, Reach
from gpu_ops.kernels.decode_attention import PagedCache, decode_attention, head_rules, split_space
from gpu_ops.kernels.operands import Half
from gpu_ops.kernels.reference_attention import decode_attention as oracle
from gpu_ops.kernels.reference_numbers import HalfBits, narrow, widen
from tests.gpu.frameworks import cupy
from tests.gpu.kernel_rig import POISON_HALF, put, run, spaced_pages

pytestmark = pytest.mark.gpu

DEVICE = 0
Lengths = Sequence[int]


@pytest.fixture(autouse=True)
def exact_allocations() -> Iterator[None]:
    """Every array an allocation of its own, so that compute-sanitizer knows its borders."""
    with cupy.cuda.using_allocator(None):
        yield


@pytest.fixture
def stream() -> Any:
    return cupy.cuda.Stream(non_blocking=True)


@dataclass
class Problem:
    """Sequences whose pages lie scattered in a pool; every other page, page 0 first, and what lies behind a sequence's
    end is poison."""

    queries: HalfBits
    keys: HalfBits
    values: HalfBits
    tables: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    table_of_head: list[int]
    scale: float

    def want(self, reaches: Sequence[Reach]) -> tuple[Any, Any]:
        """The oracle's answer, and its slack."""
        pool = (self.queries, self.keys, self.values, self.tables)
        return oracle(*pool, self.table_of_head, reaches, self.lengths, self.scale)

    def found(self, stream: Any, reaches: Sequence[Reach], splits: int) -> HalfBits:
        """The kernel's answer."""
        rules = head_rules(self.table_of_head, reaches, DEVICE)
        batch, heads, width = self.queries.shape
        space = split_space(batch, heads, width, splits, DEVICE)
        keys, values = (spaced_pages(plane, POISON_HALF)[1] for plane in (self.keys, self.values))
        cache = PagedCache(keys, values, put(self.tables), put(self.lengths))
        out = put(np.full(self.queries.shape, 0xDEAD, np.uint16))
        queries = put(self.queries)
        run(stream, lambda on: decode_attention(queries, cache, rules, space, out, on, self.scale))
        bits: HalfBits = out.get()
        return bits


def problem(
    rng: np.random.Generator,
    lengths: Lengths,
    heads: tuple[int, int],
    width: int,
    block_tokens: int,
    table_of_head: list[int],
    percent_holes: int = 0,
) -> Problem:
    """``heads``: of queries, of keys."""
    columns = max(1, -(-max(lengths) // block_tokens))
    each = max(table_of_head) + 1
    rows = len(lengths) * each
    used = rows * columns
    pages = used + 4
    tables = (rng.permutation(pages - 1)[:used] + 1).reshape(rows, columns).astype(np.int32)  # never page 0
    keys, values = np.full((2, pages, heads[1], block_tokens, width), POISON_HALF, np.uint16)
    for row, column in np.ndindex(rows, columns):
        there = min(block_tokens, lengths[row // each] - column * block_tokens)
        if there <= 0:
            tables[row, column] = -1
            continue
        for plane in (keys, values):
            numbers = rng.standard_normal((heads[1], there, width)).astype(np.float32)
            plane[tables[row, column], :, :there] = narrow(numbers, Half.BF16)
    for row, column in np.ndindex(rows, columns):
        if tables[row, column] >= 0 and rng.integers(100) < percent_holes:
            keys[tables[row, column]] = values[tables[row, column]] = POISON_HALF
            tables[row, column] = pages if rng.random() < 0.2 else -1
    queries = narrow(2 * rng.standard_normal((len(lengths), heads[0], width)).astype(np.float32), Half.BF16)
    return Problem(queries, keys, values, tables, np.array(lengths, np.int32), table_of_head, width**-0.5)


def close(found: HalfBits, want: tuple[Any, Any]) -> None:
    """Assert that a result is as near as bf16 allows."""
    exact, slack = want
    missed = np.abs(widen(found, Half.BF16) - exact)
    assert np.isfinite(missed).all()
    worst = np.unravel_index(np.argmax(missed - slack), missed.shape)
    assert (missed <= slack).all(), f"at {worst}: {missed[worst]} of {exact[worst]}, allowed {slack[worst]}"


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (8, 2), (16, 1), (40, 2)])
@pytest.mark.parametrize("block_tokens", [16, 48, 64, 128])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_every_shape(
    rng: np.random.Generator, stream: Any, width: int, block_tokens: int, heads: tuple[int, int], splits: int
) -> None:
    given = problem(rng, [1, 15, 16, 17, 130, 0, 333], heads, width, block_tokens, [0] * heads[1])
    reaches = [EVERYTHING] * heads[1]
    close(given.found(stream, reaches, splits), given.want(reaches))


@pytest.mark.parametrize("splits", [1, 2, 7])
@pytest.mark.parametrize("block_tokens", [16, 32, 64])
def test_heads_with_windows_sinks_and_tables_of_their_own(
    rng: np.random.Generator, stream: Any, block_tokens: int, splits: int
) -> None:
    reaches = [EVERYTHING, Reach(1), Reach(16, 1), Reach(100, 17), Reach(64, 64), Reach(33)]
    given = problem(rng, [5, 64, 65, 200, 509], (12, 6), 128, block_tokens, list(range(6)), percent_holes=25)
    close(given.found(stream, reaches, splits), given.want(reaches))


def test_heads_of_a_group_share_a_table(rng: np.random.Generator, stream: Any) -> None:
    reaches = [EVERYTHING, Reach(40, 4), EVERYTHING, Reach(40, 4)]
    given = problem(rng, [77, 300], (8, 4), 64, 16, [0, 1, 0, 1], percent_holes=10)
    shared = given.found(stream, reaches, 2)
    close(shared, given.want(reaches))
    each = given.tables.reshape(2, 2, -1)[:, given.table_of_head].reshape(8, -1)
    given.tables, given.table_of_head = np.ascontiguousarray(each), [0, 1, 2, 3]
    np.testing.assert_array_equal(given.found(stream, reaches, 2), shared)


def test_what_lies_behind_a_window_may_be_given_back(rng: np.random.Generator, stream: Any) -> None:
    """Holes in front of the window change no bit."""
    reaches = [Reach(50, 20), Reach(50, 20)]
    given = problem(rng, [400, 130], (4, 2), 128, 16, [0, 0])
    whole = given.found(stream, reaches, 3)
    for row, length in enumerate(given.lengths):
        recycled = slice(2, (int(length) - 50) // 16)
        assert given.tables[row, recycled].size
        given.tables[row, recycled] = -1
    np.testing.assert_array_equal(given.found(stream, reaches, 3), whole)
    close(whole, given.want(reaches))


@pytest.mark.parametrize("reach", [Reach(333), Reach(1000), Reach(333, 16), Reach(1 << 30, 1 << 30)])
def test_a_window_over_everything_changes_no_bit(rng: np.random.Generator, stream: Any, reach: Reach) -> None:
    given = problem(rng, [333, 100, 1], (8, 2), 128, 64, [0, 0])
    plain = given.found(stream, [EVERYTHING] * 2, 4)
    np.testing.assert_array_equal(given.found(stream, [reach] * 2, 4), plain)


def test_without_anything_visible_the_answer_is_zero(rng: np.random.Generator, stream: Any) -> None:
    given = problem(rng, [64, 0], (4, 2), 64, 16, [0, 0])
    given.tables[:] = -1
    for splits in (1, 2):
        assert not given.found(stream, [EVERYTHING] * 2, splits).any()


def test_long_sequences_and_large_scores(rng: np.random.Generator, stream: Any) -> None:
    given = problem(rng, [4099, 2048], (8, 2), 128, 64, [0, 0])
    given.queries = narrow(8 * widen(given.queries, Half.BF16), Half.BF16)
    for splits in (1, 16):
        close(given.found(stream, [EVERYTHING] * 2, splits), given.want([EVERYTHING] * 2))


def test_tensors_of_torch_are_taken_as_they_are(rng: np.random.Generator, stream: Any) -> None:
    torch = pytest.importorskip("torch")
    given = problem(rng, [100, 33], (8, 2), 128, 16, [0, 0])
    reaches = [EVERYTHING, Reach(20)]

    def tensor(bits: npt.NDArray[Any]) -> Any:
        made = torch.from_numpy(bits.view(np.int16) if bits.dtype == np.uint16 else bits).cuda()
        return made.view(torch.bfloat16) if bits.dtype == np.uint16 else made

    cache = PagedCache(tensor(given.keys), tensor(given.values), tensor(given.tables), tensor(given.lengths))
    queries = tensor(given.queries)
    out = torch.zeros_like(queries)
    rules, space = head_rules([0, 0], reaches, DEVICE), split_space(2, 8, 128, 2, DEVICE)
    torch.cuda.synchronize()
    run(stream, lambda on: decode_attention(queries, cache, rules, space, out, on, given.scale))
    close(out.view(torch.int16).cpu().numpy().view(np.uint16), given.want(reaches))


def test_pages_beyond_two_to_the_31_elements_are_reached(rng: np.random.Generator, stream: Any) -> None:
    given = problem(rng, [40], (4, 1), 128, 16, [0])
    pages = 2 + (1 << 31) // (16 * 128)
    keys, values = (cupy.zeros((pages, 1, 16, 128), np.uint16) for _ in range(2))
    far = pages - len(given.keys) + given.tables
    for plane, few in zip((keys, values), (given.keys, given.values), strict=True):
        plane[pages - len(few) :] = put(few)
    cache = PagedCache(keys, values, put(far.astype(np.int32)), put(given.lengths))
    out, queries = put(np.zeros(given.queries.shape, np.uint16)), put(given.queries)
    rules, space = head_rules([0], [EVERYTHING], DEVICE), split_space(1, 4, 128, 1, DEVICE)
    run(stream, lambda on: decode_attention(queries, cache, rules, space, out, on, given.scale))
    close(out.get(), given.want([EVERYTHING]))
