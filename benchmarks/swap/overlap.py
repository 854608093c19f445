"""Time to first token of a prompt whose prefix lies on the host, loaded layer by layer behind the prefill of the rest.

    python -m benchmarks.swap.overlap [--json OUT] [--prefixes 4096,16384,65536] [--repeats 5]

A daemon in one process, an engine with the compute of an 8B model (``prefill_model``) in this one. Every time counts
from Match to the last token's hidden state on the host. ``compute``: the prefix is on the device. ``transfer``: until
the whole prefix has come, and nothing is computed. ``overlapped``: streams wait for each layer. ``after``: everything
is loaded, then computed. ``recompute``: the whole prompt from nothing, in chunks. Before each load the device pages are
overwritten; the overlapped result must equal that of a resident prefix bit for bit. ``pages``: the device pool hands
out ``runs``, or every second page is held by another engine, so that free ones are ``singles``. Budget: 1.05 times the
larger of compute and transfer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from cachesvc_client import CacheClientError, gqa
from cachesvc_ctl.core.daemon_process import DaemonFailed, DaemonProcess

from benchmarks.support.machine import describe_gpu, describe_machine, fail, require_gpu
from benchmarks.support.recording import parser_of, save
from benchmarks.swap.prefill_engine import (
    BLOCK_TOKENS,
    NEW_TOKENS,
    VOCABULARY,
    Engine,
    GpuCompute,
    clock,
    running_engine,
)

BLOCK_BYTES = 32 * 2 * 8 * BLOCK_TOKENS * 128 * 2
BUDGET = 1.05
GIB = 1 << 30


@dataclass(frozen=True)
class Row:
    """Milliseconds, medians, of one length of prefix."""

    prefix_tokens: int
    pages: str
    prefix_bytes: int
    compute_ms: float
    transfer_ms: float
    overlapped_ms: float
    after_ms: float
    recompute_ms: float
    of_the_larger: float
    speed_up: float
    transfer_gb_per_s: float


def measure(engine: Engine, prefix_tokens: int, repeats: int) -> Row:
    """One row."""
    rng = np.random.default_rng(prefix_tokens)
    tokens = rng.integers(0, VOCABULARY, prefix_tokens + NEW_TOKENS, np.int64)
    prefix = engine.keys(tokens[:prefix_tokens])
    every, new = engine.to_device(tokens), engine.to_device(tokens[prefix_tokens:])
    if engine.has_singles_alone:
        engine.overlapped(prefix, new, prefix_tokens, on_host=True)  # it was computed before: bring it back
    else:
        engine.compute_prefix(tokens[:prefix_tokens])
    resident = engine.overlapped(prefix, new, prefix_tokens, on_host=False)
    compute = timed(repeats, lambda: engine.overlapped(prefix, new, prefix_tokens, on_host=False))
    spent: dict[str, list[float]] = {"transfer": [], "overlapped": [], "after": []}
    for _ in range(repeats + 1):
        engine.leave_to_host()
        spent["transfer"].append(clock(lambda: engine.transfer(prefix))[0])
        engine.leave_to_host()
        seconds, result = clock(lambda: engine.overlapped(prefix, new, prefix_tokens, on_host=True))
        spent["overlapped"].append(seconds)
        assert result == resident, "the overlapped result differs from the resident one"
        engine.leave_to_host()
        seconds, result = clock(lambda: engine.loaded_first(prefix, new, prefix_tokens))
        spent["after"].append(seconds)
        assert result == resident, "the loaded result differs from the resident one"
    recompute = timed(2, lambda: engine.recompute(every))
    transfer, overlapped, after = (statistics.median(one[1:]) * 1e3 for one in spent.values())
    size_bytes = prefix_tokens // BLOCK_TOKENS * BLOCK_BYTES
    return Row(
        prefix_tokens,
        "singles" if engine.has_singles_alone else "runs",
        size_bytes,
        compute,
        transfer,
        overlapped,
        after,
        recompute,
        overlapped / max(compute, transfer),
        recompute / overlapped,
        size_bytes / transfer / 1e6,
    )


def timed(repeats: int, work: Callable[[], Any]) -> float:
    """Median milliseconds, after one to warm up."""
    return statistics.median([clock(work)[0] for _ in range(repeats + 1)][1:]) * 1e3


def show(row: Row) -> None:
    """One line."""
    print(
        f"{row.prefix_tokens:>7} {row.pages:>8} {row.compute_ms:>9.1f} {row.transfer_ms:>9.1f} "
        f"{row.overlapped_ms:>11.1f} {row.of_the_larger:>6.3f} {row.after_ms:>9.1f} {row.recompute_ms:>10.1f} "
        f"{row.speed_up:>8.1f}x {row.transfer_gb_per_s:>6.1f}",
        flush=True,
    )


def run(prefixes: list[int], repeats: int) -> list[Row]:
    """Every length in a pool that hands out runs, then in one that has single pages alone."""
    from benchmarks.swap.prefill_model import check_attend

    check_attend()
    blocks = (max(prefixes) + NEW_TOKENS) // BLOCK_TOKENS + 16
    pool_bytes = blocks * BLOCK_BYTES + GIB
    flags = {"--device-pool": 2 * pool_bytes, "--host-pool": 2 * pool_bytes, "--host-threads": 8}
    layout = gqa(layers=32, kv_heads=8, head_dim=128, block_tokens=BLOCK_TOKENS)
    rows = []
    print(
        f"{'prefix':>7} {'pages':>8} {'compute':>9} {'transfer':>9} {'overlapped':>11} {'ratio':>6} {'after':>9} "
        f"{'recompute':>10} {'speed-up':>9} {'GB/s':>6}   (ms; ratio to the larger of compute and transfer)"
    )
    parts = [part for name, value in flags.items() for part in (name, str(value))]
    with (
        DaemonProcess(["--backend", "cuda", "--write-policy", "write_through", *parts]) as daemon,
        running_engine(daemon.socket, layout, GpuCompute, device_pages=2 * blocks, host_pages=2 * blocks) as engine,
    ):
        for prefix_tokens in prefixes:
            rows.append(measure(engine, prefix_tokens, repeats))
            show(rows[-1])
        engine.take_every_second_page()
        for prefix_tokens in prefixes:
            rows.append(measure(engine, prefix_tokens, repeats))
            show(rows[-1])
    return rows


def main() -> None:
    """Measure, print the table, and write it as JSON where asked."""
    parser = parser_of(__doc__)
    parser.add_argument("--prefixes", default="4096,16384,65536", help="tokens, multiples of 64")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    require_gpu("torch")
    prefixes = [int(part) for part in arguments.prefixes.split(",")]
    if any(tokens % BLOCK_TOKENS for tokens in prefixes):
        fail(f"--prefixes {arguments.prefixes}: no multiples of {BLOCK_TOKENS}")
    try:
        rows = run(prefixes, arguments.repeats)
    except (DaemonFailed, CacheClientError) as error:
        fail(str(error))
    found = {
        "benchmark": "overlap",
        "machine": describe_machine() | describe_gpu(),
        "new_tokens": NEW_TOKENS,
        "rows": [asdict(row) for row in rows],
    }
    save(arguments, found)


if __name__ == "__main__":
    main()
