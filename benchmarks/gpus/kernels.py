"""Kernels beside the device's copy bandwidth, and decode attention beside torch's on the same dense problem.

    python -m benchmarks.gpus.kernels [--json OUT] [--only NAME]

Each kernel runs in a CUDA graph of many launches, so no time of the host's is counted; ``call_us`` is what one call of
the wrapper takes there. Bytes are what must be read and written; the ceiling is a plain copy's, both ways counted.
``wrong`` counts bytes that differ from the oracle's, on a smaller problem (``benchmarks.gpus.kernel_cases``).
Attention: ``ratio`` is the time beside torch's scaled_dot_product_attention over dense keys and values; ``worst`` is
the largest difference between the two, beside the largest value. Needs CuPy and torch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.gpus.kernel_cases import BIG, CASES, SMALL, Case
from benchmarks.support.machine import describe_gpu, describe_machine, require_gpu
from benchmarks.support.recording import parser_of, save
from gpu_ops.kernels.batches import EVERYTHING, Reach
from gpu_ops.kernels.decode_attention import PagedCache, decode_attention, head_rules, plan_splits, split_space

COPY_BYTES = 1 << 30
LAUNCHES, REPEATS, CALLS = 10, 15, 100
BLOCK_TOKENS = 64
SEED = 20
LEAST_SHARE = 0.80
MOST_RATIO = 1.5
HALF_WINDOWED = Reach(1024, 64)


@dataclass(frozen=True)
class Shape:
    """A decode step: sequences, query heads, kv heads, tokens each, elements a head."""

    batch: int
    query_heads: int
    kv_heads: int
    tokens: int
    width: int


SHAPES = (
    Shape(1, 32, 8, 131_072, 128),
    Shape(16, 32, 8, 8192, 128),
    Shape(64, 32, 8, 2048, 128),
    Shape(64, 8, 8, 2048, 128),
    Shape(32, 64, 8, 4096, 64),
    Shape(16, 16, 8, 4096, 256),
)


@dataclass(frozen=True)
class Moved:
    """A kernel that moves bytes."""

    name: str
    megabytes: float
    us: float
    gb_per_s: float
    share_of_copy: float
    call_us: float
    wrong: int


@dataclass(frozen=True)
class Attended:
    """A decode step beside torch's; ``windowed_us``: with every other kv head behind a window of 1,024 and 64 sinks."""

    shape: Shape
    splits: int
    us: float
    torch_us: float
    ratio: float
    gb_per_s: float
    share_of_copy: float
    windowed_us: float
    worst: float
    largest: float


def graph_us(stream: Any, queue: Callable[[int], None]) -> float:
    """Median microseconds of one launch on the device."""
    import cupy

    queue(stream.ptr)  # loads the kernels
    stream.synchronize()
    with stream:
        stream.begin_capture()
        for _ in range(LAUNCHES):
            queue(stream.ptr)
        graph = stream.end_capture()
    spent: list[float] = []
    for _ in range(REPEATS + 1):
        began, ended = cupy.cuda.Event(), cupy.cuda.Event()
        began.record(stream)
        graph.launch(stream)
        ended.record(stream)
        ended.synchronize()
        spent.append(cupy.cuda.get_elapsed_time(began, ended) * 1e3 / LAUNCHES)
    return statistics.median(spent[1:])


def copy_rate(stream: Any) -> float:
    """GB/s of a plain copy on the device, read and written."""
    import cupy

    source, target = (cupy.zeros(COPY_BYTES, np.uint8) for _ in range(2))
    cupy.cuda.Device().synchronize()
    kind = cupy.cuda.runtime.memcpyDeviceToDevice

    def queue(on: int) -> None:
        cupy.cuda.runtime.memcpyAsync(target.data.ptr, source.data.ptr, COPY_BYTES, kind, on)

    return 2 * COPY_BYTES / graph_us(stream, queue) / 1e3


def call_us(stream: Any, queue: Callable[[int], None]) -> float:
    """Microseconds that the host needs for a call. The queue never fills."""
    spent = []
    for _ in range(CALLS):
        began = time.perf_counter()
        queue(stream.ptr)
        spent.append((time.perf_counter() - began) * 1e6)
        stream.synchronize()
    return statistics.median(spent)


def wrong_bytes(stream: Any, case: Case) -> int:
    """Bytes of a case's outputs that are not the oracle's."""
    import cupy

    cupy.cuda.Device().synchronize()
    case.queue(stream.ptr)
    stream.synchronize()
    wrong = 0
    for found, want in zip(case.outputs, case.want(), strict=True):
        got = np.ascontiguousarray(found.get())
        expected = np.ascontiguousarray(want, got.dtype)
        wrong += int((got.view(np.uint8) != expected.view(np.uint8)).sum())
    return wrong


def measure_moved(stream: Any, name: str, copy_gb_per_s: float) -> Moved:
    """One kernel: checked on a small problem, timed on a large one."""
    import cupy

    make = CASES[name]
    wrong = wrong_bytes(stream, make(np.random.default_rng(SEED), SMALL))
    case = make(np.random.default_rng(SEED), BIG)
    cupy.cuda.Device().synchronize()
    us = graph_us(stream, case.queue)
    rate = case.bytes / us / 1e3
    return Moved(name, case.bytes / 1e6, us, rate, rate / copy_gb_per_s, call_us(stream, case.queue), wrong)


def measure_attention(stream: Any, shape: Shape, copy_gb_per_s: float) -> Attended:
    """One decode step, paged and dense."""
    import torch

    torch.manual_seed(SEED)
    like = {"dtype": torch.bfloat16, "device": "cuda"}
    dense = (shape.batch, shape.kv_heads, shape.tokens, shape.width)
    queries = torch.randn((shape.batch, shape.query_heads, shape.width), **like)
    keys, values = (torch.randn(dense, **like) for _ in range(2))
    columns = shape.tokens // BLOCK_TOKENS
    order = torch.randperm(shape.batch * columns, device="cuda")
    cache = PagedCache(
        _paged(keys, order),
        _paged(values, order),
        order.reshape(shape.batch, columns).to(torch.int32),
        torch.full((shape.batch,), shape.tokens, dtype=torch.int32, device="cuda"),
    )
    group = shape.query_heads // shape.kv_heads
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    splits = plan_splits(shape.batch, shape.kv_heads, group, shape.tokens, sms)
    space = split_space(shape.batch, shape.query_heads, shape.width, splits, 0)
    heads = range(shape.kv_heads)
    plain, mixed = (
        head_rules([0] * shape.kv_heads, [other if head % 2 else EVERYTHING for head in heads], 0)
        for other in (EVERYTHING, HALF_WINDOWED)
    )
    out = torch.empty_like(queries)
    scale = shape.width**-0.5
    torch.cuda.synchronize()
    windowed_us = graph_us(stream, lambda on: decode_attention(queries, cache, mixed, space, out, on, scale))
    us = graph_us(stream, lambda on: decode_attention(queries, cache, plain, space, out, on, scale))
    torch_us, reference = _torch_attention(queries, keys, values)
    rate = 2 * keys.numel() * keys.element_size() / us / 1e3
    return Attended(
        shape,
        splits,
        us,
        torch_us,
        us / torch_us,
        rate,
        rate / copy_gb_per_s,
        windowed_us,
        float((out.float() - reference.float()).abs().max()),
        float(reference.float().abs().max()),
    )


def _paged(plane: Any, order: Any) -> Any:
    """``[batch, heads, tokens, D]`` as pages, block ``at`` of the batch on page ``order[at]``."""
    batch, heads, _, width = plane.shape
    blocks = plane.reshape(batch, heads, -1, BLOCK_TOKENS, width).transpose(1, 2).flatten(0, 1)
    pages = plane.new_empty(blocks.shape)
    pages[order] = blocks
    return pages


def _torch_attention(queries: Any, keys: Any, values: Any) -> tuple[float, Any]:
    """Median microseconds of torch's, in a graph as well, and its answer."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    asked = queries[:, :, None]

    def attend() -> Any:
        return scaled_dot_product_attention(asked, keys, values, enable_gqa=True)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        answer = attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            attend()
    spent = []
    for _ in range(REPEATS + 1):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        spent.append(began.elapsed_time(ended) * 1e3 / LAUNCHES)
    return statistics.median(spent[1:]), answer[:, :, 0]


def print_moved(rows: list[Moved], copy_gb_per_s: float) -> None:
    """The table of what moves bytes."""
    print(f"plain copy on the device: {copy_gb_per_s:.0f} GB/s, read and written")
    print(f"{'kernel':28}{'MB':>9}{'us':>10}{'GB/s':>8}{'of copy':>9}{'call us':>9}{'wrong':>7}")
    for row in rows:
        print(
            f"{row.name:28}{row.megabytes:9.1f}{row.us:10.1f}{row.gb_per_s:8.0f}{row.share_of_copy:9.2f}"
            f"{row.call_us:9.1f}{row.wrong:7d}"
        )


def print_attended(rows: list[Attended]) -> None:
    """The table of attention."""
    print(f"\n{'batch x heads / kv x tokens x D':36}{'splits':>7}{'us':>9}{'torch':>9}{'ratio':>7}", end="")
    print(f"{'GB/s':>7}{'of copy':>9}{'windows':>9}{'worst':>10}{'largest':>9}")
    for row in rows:
        shape = row.shape
        title = f"{shape.batch} x {shape.query_heads} / {shape.kv_heads} x {shape.tokens} x {shape.width}"
        print(f"{title:36}{row.splits:7d}{row.us:9.1f}{row.torch_us:9.1f}{row.ratio:7.2f}{row.gb_per_s:7.0f}", end="")
        print(f"{row.share_of_copy:9.2f}{row.windowed_us:9.1f}{row.worst:10.2g}{row.largest:9.2g}")


def main() -> None:
    """Measure, print the tables, and write them as JSON where asked."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=[*CASES, "attention"], help="one kernel")
    arguments = parser.parse_args()
    require_gpu("cupy", "torch")
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    rate = copy_rate(stream)
    names = [name for name in CASES if arguments.only in (None, name)]
    moved = [measure_moved(stream, name, rate) for name in names]
    print_moved(moved, rate)
    shapes = SHAPES if arguments.only in (None, "attention") else ()
    attended = [measure_attention(stream, shape, rate) for shape in shapes]
    print_attended(attended)
    print(f"\nwanted: copies at {LEAST_SHARE:.2f} of a plain one, attention within {MOST_RATIO:.1f} of torch's time")
    found = {
        "benchmark": "kernels",
        "machine": describe_machine() | describe_gpu(),
        "copy_gb_per_s": rate,
        "wanted": {"share_of_copy": LEAST_SHARE, "ratio": MOST_RATIO},
        "moved": [asdict(row) for row in moved],
        "attention": [asdict(row) for row in attended],
    }
    save(arguments, found)


if __name__ == "__main__":
    main()
