"""Gathers the latent keys of a prefill: cached ones by block tables, new ones between them, latent apart from rope.

Output row ``starts_k[b] + i`` is sequence ``b``'s i-th key within reach: first the cached ones, then the new ones. What
lies in a hole of the table is zeros. See ``gpu_ops.kernels.batches`` for ``starts`` and reach.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu_ops.kernels.batches import EVERYTHING, BlockTable, Reach
from gpu_ops.kernels.launch import blocks_for, launch
from gpu_ops.kernels.operands import VECTOR_BYTES, Array, Half, Kind, Operand, operand, require, same_device
from gpu_ops.kernels.packed_keys import read_packed_pool

SOURCE = "latents"
TILE, THREADS = 16, 128
PIECE_VALUES = 16


@dataclass(frozen=True, slots=True, eq=False)
class NewLatents:
    """This step's keys: ``[tokens, latent values]`` and ``[tokens, rope values]``; columns of one array will do."""

    latent: Array
    rope: Array


@dataclass(frozen=True, slots=True, eq=False)
class Gathering:
    """Ranges of the keys: ``starts_q`` and ``starts_k`` as ``cumulate_lengths`` wrote them.

    ``cached`` is needed with a window or sinks alone, and ``reach`` is what ``starts_k`` was made with.
    """

    cells: Array
    starts_q: Array
    starts_k: Array
    cached: Array | None = None
    reach: Reach = EVERYTHING


def gather_latents(
    pool: Array, new: NewLatents, whose: Gathering, latent_out: Array, rope_out: Array, stream: int
) -> None:
    """Queue the gathering from ``pool``, ``[pages, 1, block_tokens, latent + rope]`` of sixteen-bit floats of any kind.

    A copy: bit by bit. ``latent_out`` and ``rope_out`` are ``[starts_k[-1], ...]``; further rows stay as they are.
    Raises ValueError, with nothing queued.
    """
    latent, rope = _read_new(new, Kind.HALF)
    values = (latent.shape[1], rope.shape[1])
    for one, width in zip((latent, rope), values, strict=True):
        require(width * 2 % VECTOR_BYTES == 0, f"{one.name}: {width} values, not a multiple of 8")
    pages = operand("pool", pool, Kind.HALF, (None, 1, None, sum(values))).dense(2).aligned(1).spaced()
    vectors = tuple(width * 2 // VECTOR_BYTES for width in values)
    _launch("gather_latents", pages, (latent, rope), whose, (latent_out, rope_out), Kind.HALF, vectors, stream)


def gather_packed_latents(
    pool: Array, new: NewLatents, whose: Gathering, latent_out: Array, rope_out: Array, stream: int, half: Half
) -> None:
    """Gather from packed rows, ``[pages, 1, block_tokens, 656]`` bytes.

    Code times scale in fp32, rounded to ``half``; rope and new tokens are copied. Raises ValueError, with nothing
    queued.
    """
    latent, rope = _read_new(new, half.kind)
    values = (latent.shape[1], rope.shape[1])
    pages = read_packed_pool(pool, *values)
    require(values[1] % PIECE_VALUES == 0, f"rope: {values[1]} values, not a multiple of {PIECE_VALUES}")
    kernel = f"gather_packed_latents_{half.value}"
    _launch(kernel, pages, (latent, rope), whose, (latent_out, rope_out), half.kind, values, stream)


def _read_new(new: NewLatents, kind: Kind) -> tuple[Operand, Operand]:
    latent = operand("latent", new.latent, kind, (None, None))
    rope = operand("rope", new.rope, kind, (latent.shape[0], None))
    for one in (latent, rope):
        one.dense(1).aligned(1).spaced()
    return latent, rope


def _launch(
    kernel: str,
    pages: Operand,
    new: tuple[Operand, Operand],
    whose: Gathering,
    outputs: tuple[Array, Array],
    kind: Kind,
    widths: tuple[int, ...],
    stream: int,
) -> None:
    """``widths`` counts what the kernel counts: vectors or values."""
    latent, rope = new
    reach = whose.reach
    reach.check()
    bounded = reach.window_tokens > 0 or reach.sink_tokens > 0
    require(whose.cached is not None or not bounded, "cached: needed for a window")
    starts = operand("starts_q", whose.starts_q, Kind.INT32, (None,)).dense()
    rows = starts.count - 1
    require(rows > 0, f"starts_q: {starts.count} entries; rows + 1, of one row at least")
    starts_k = operand("starts_k", whose.starts_k, Kind.INT32, (rows + 1,)).dense()
    cached = None if whose.cached is None else operand("cached", whose.cached, Kind.INT32, (rows,)).dense()
    cells, shape = BlockTable(whose.cells, pages.shape[0], pages.shape[2]).read(rows)
    tokens = operand("latent_out", outputs[0], kind, (None, latent.shape[1])).shape[0]
    written = [
        operand(name, array, kind, (tokens, one.shape[1])).dense().aligned()
        for name, array, one in (("latent_out", outputs[0], latent), ("rope_out", outputs[1], rope))
    ]
    if not tokens:
        return
    present = [cached] if cached is not None else []
    device = same_device(pages, cells, latent, rope, starts, starts_k, *present, *written)
    arguments = (
        *(pages, pages.strides[0], pages.shape[0], pages.shape[2]),
        *(cells, *shape),
        *(latent, latent.strides[0], rope, rope.strides[0], latent.shape[0]),
        *(starts, starts_k, cached, rows, reach.window_tokens, reach.sink_tokens),
        *(*written, tokens, *widths),
    )
    launch(SOURCE, kernel, (blocks_for(tokens, TILE),), THREADS, arguments, stream, device)
