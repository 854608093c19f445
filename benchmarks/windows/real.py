"""Throughput gain of recycling behind windows, with real engines: ``python -m benchmarks.windows.real --json OUT``.

The example engine, with a share of each layer's kv heads in a window, serves requests that begin alike through a real
daemon whose pool is too small for them: the same bytes with and without recycling, prefix caching on. ``benchmarks.
windows`` has the sizes of real models, in modelled time; here the model is small and time is time. A preempted request
is computed again, for the host has no pages. The answers with and without recycling must be the same, to the token.

On a GPU the chunks of an iteration run side by side in lanes of one shape, as many as 32, so that a step takes about as
long for any mix of requests; on NumPy they run one after another, and requests in flight gain nothing but fewer
preemptions.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from cachesvc_client import CacheClient, Layout, Lease, Plane, PlaneGroup, TicketView
from cachesvc_ctl.core.daemon_process import DaemonProcess

from benchmarks.support.machine import fail, require_gpu
from benchmarks.support.recording import parser_of, save
from benchmarks.windows.capacity_plan import pools_shared, pools_split, requests_of
from examples.batch_requests import BatchCounters, BatchLimits, Request
from examples.batching import BatchEngine
from examples.engine import answer_alone, layout_of
from examples.tiny_transformer.arrays import NUMPY, Arrays, torch_arrays
from examples.tiny_transformer.config import F32, Group, TinyConfig, head_wise, list_groups, list_planes
from examples.tiny_transformer.families import Gqa
from examples.tiny_transformer.model import TinyTransformer, Work, build_model
from examples.tiny_transformer.tokens import BYTE_COUNT, Tokens
from examples.workers import PoolWorker, StreamWorker, Worker

SEED = 42
SHARES = (0.25, 0.5, 0.75, 1.0)
BLOCK_TOKENS = 16
POOLS = len(SHARES) * 2  # each run is a model of its own, whose pool stays


@dataclass(frozen=True)
class Scale:
    """Size of a run. ``pool_requests``: whole requests of the mean length that fit without recycling."""

    requests: int
    mean_in: int
    mean_out: int
    shared_tokens: int
    window_tokens: int
    pool_requests: int
    step_tokens: int
    layers: int
    d_model: int
    kv_heads: int = 4
    head_dim: int = 32

    @property
    def max_positions(self) -> int:
        """Room for the longest request: lengths are within a quarter of their means, and rounded up a little."""
        return -(-(self.mean_in + self.mean_out) * 2 // BLOCK_TOKENS) * BLOCK_TOKENS

    @property
    def pool_bytes(self) -> int:
        """Bytes of the whole pool."""
        token_bytes = 2 * self.layers * self.kv_heads * self.head_dim * 4
        return self.pool_requests * (self.mean_in + self.mean_out) * token_bytes


FULL = Scale(
    requests=64,
    mean_in=512,
    mean_out=196,
    shared_tokens=48,
    window_tokens=192,
    pool_requests=8,
    step_tokens=192,
    layers=4,
    d_model=512,
    kv_heads=8,
    head_dim=64,
)
"""The source system's lengths by a twentieth: 10.6k tokens in, 4k out, windows of 4k, 1k in common."""

QUICK = Scale(
    requests=10,
    mean_in=96,
    mean_out=24,
    shared_tokens=32,
    window_tokens=32,
    pool_requests=3,
    step_tokens=64,
    layers=2,
    d_model=32,
    head_dim=8,
)


class Case(NamedTuple):
    """One run: ``share`` of the kv heads have a window."""

    share: float
    recycles: bool


class Run(NamedTuple):
    """Result of one run."""

    figures: dict[str, float]
    answers: list[list[int]]


class MeteredWorker:
    """A worker that counts the sequences it computes, weighted by time."""

    def __init__(self, worker: Worker) -> None:
        self.seconds = 0.0
        self.request_seconds = 0.0
        self.most = 0
        self._worker = worker

    @property
    def model(self) -> TinyTransformer:
        """The worker's."""
        return self._worker.model

    def compute(self, works: Sequence[Work], tickets: Sequence[TicketView]) -> list[F32]:
        """Compute with the worker and count."""
        began = time.perf_counter()
        logits = self._worker.compute(works, tickets)
        seconds = time.perf_counter() - began
        self.seconds += seconds
        self.request_seconds += seconds * len(works)
        self.most = max(self.most, len(works))
        return logits

    def guess(self, works: Sequence[Work], tickets: Sequence[TicketView]) -> list[F32]:
        """Guess with the worker and count."""
        return self._worker.guess(works, tickets)


def main() -> None:
    """Print the table and write JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--backend", choices=("shm", "cuda"), default="shm", help="cuda computes with torch")
    parser.add_argument("--quick", action="store_true", help="a small run, to see that it works")
    arguments = parser.parse_args()
    is_cuda = arguments.backend == "cuda"
    if is_cuda:
        require_gpu("torch")
    scale = QUICK if arguments.quick else FULL
    arrays: Arrays = torch_arrays("cuda:0") if is_cuda else NUMPY
    if is_cuda:  # all chunks of an iteration are of one shape
        arrays = replace(arrays, lanes=32, step_blocks=scale.max_positions // BLOCK_TOKENS)
    with DaemonProcess(daemon_flags(arguments.backend, scale)) as daemon:
        rows = [measure_share(daemon.socket, arguments.backend, arrays, scale, share) for share in SHARES]
    show(rows)
    save(arguments, result_of(arguments.backend, arrays, scale, rows))


def daemon_flags(backend: str, scale: Scale) -> list[str]:
    """Room for every run's pool, each rounded up to whole units of device memory."""
    mib = POOLS * (scale.pool_bytes // (1 << 20) + 16)
    calibration = ["--calibration", "never"] if backend == "cuda" else []
    return ["--backend", backend, "--device-pool", f"{mib}MiB", "--host-pool", "64MiB", *calibration]


def config_of(scale: Scale, share: float) -> TinyConfig:
    """The model: in each layer the last heads have the window."""
    windowed = round(share * scale.kv_heads)
    heads = tuple(head >= scale.kv_heads - windowed for head in range(scale.kv_heads))
    groups = (Group("full"), Group("window", scale.window_tokens))
    gqa = Gqa(heads=2 * scale.kv_heads, kv_heads=scale.kv_heads, head_dim=scale.head_dim)
    return TinyConfig(
        name=f"windows-{share:g}",
        groups=groups if windowed < scale.kv_heads else groups[1:],
        layers=head_wise(gqa, (heads,) * scale.layers, full="full", window="window"),
        block_tokens=BLOCK_TOKENS,
        d_model=scale.d_model,
        ff_dim=3 * scale.d_model,
        max_positions=scale.max_positions,
    )


def layout_for(config: TinyConfig) -> Layout:
    """The model's layout. Where every head has a window, the full group is a marker of one byte a block."""
    if len(config.groups) > 1:
        return layout_of(config)
    planes = (Plane("marker", 0, "full", (1,), "uint8"), *(Plane(*each) for each in list_planes(config)))
    groups = (PlaneGroup("full"), *(PlaneGroup(*each) for each in list_groups(config)))
    return Layout(config.block_tokens, 1, groups, planes)


def prompts_of(scale: Scale) -> tuple[list[Tokens], list[int]]:
    """The seeded trace: prompts that begin alike, and how many tokens each is answered with. All arrive at once."""
    draw = np.random.Generator(np.random.PCG64(SEED))
    shared = draw.integers(0, BYTE_COUNT, scale.shared_tokens, dtype=np.int32)
    requests = requests_of(scale.requests, 1.0, SEED, scale.mean_in, scale.mean_out)
    prompts = [
        np.concatenate((shared, draw.integers(0, BYTE_COUNT, each.prompt_tokens - len(shared), dtype=np.int32)))
        for each in requests
    ]
    return prompts, [each.output_tokens for each in requests]


def measure_share(socket: str, backend: str, arrays: Arrays, scale: Scale, share: float) -> dict[str, object]:
    """A row: the same requests without and with recycling. Ends the process where their answers differ."""
    model = build_model(config_of(scale, share), arrays)
    answer_alone(model, prompts_of(scale)[0][0], 4, 0.0, "to load what is loaded once")
    off, on = (measure(socket, backend, model, scale, Case(share, recycles)) for recycles in (False, True))
    differing = [at for at, (one, other) in enumerate(zip(off.answers, on.answers, strict=True)) if one != other]
    if differing:
        fail(f"{share:.0%} windowed: requests {differing} were answered otherwise with recycling than without")
    gain = (on.figures["output_tokens_per_s"] / off.figures["output_tokens_per_s"] - 1) * 100
    return {
        "share": share,
        "gain_percent": gain,
        "answers_equal": len(on.answers),
        "off": off.figures,
        "on": on.figures,
    }


def measure(socket: str, backend: str, model: TinyTransformer, scale: Scale, case: Case) -> Run:
    """One run, in a pool of its own."""
    layout = layout_for(model.config)
    if case.recycles:
        tokens = scale.mean_in + scale.mean_out // 2
        pages = pools_split(layout, scale.pool_bytes, tokens, scale.step_tokens)
    else:
        pages = pools_shared(layout, scale.pool_bytes)
    prompts, counts = prompts_of(scale)
    limits = BatchLimits(
        requests=scale.requests,
        token_budget=scale.step_tokens,
        chunk_tokens=scale.step_tokens // 2,
        recycles=case.recycles,
    )
    with CacheClient(socket, engine="windows") as client:
        name = f"{model.config.name} {'on' if case.recycles else 'off'}"
        registration = client.register(name, layout, device_pages=pages, host_pages=(0, 0))
        with client.open_lease(registration) as lease:
            requests, seconds, counters, worker = _serve(backend, model, lease, limits, prompts, counts)
    print(f"{name}: {seconds:.1f} s", file=sys.stderr, flush=True)
    output_tokens = sum(len(each.answer) for each in requests)
    figures = {
        "output_tokens_per_s": output_tokens / seconds,
        "mean_running": worker.request_seconds / worker.seconds,
        "most_running": worker.most,
        "preemptions": counters.recomputed + counters.swapped_out,
        "hit_tokens": counters.hit_tokens,
        "recycled_pages": counters.recycled_cells,
        "seconds": seconds,
        "steps": counters.steps,
        "output_tokens": output_tokens,
        "full_pages": pages[0],
        "window_pages": pages[1],
        "page_bytes": sum(count * layout.page_bytes(group) for group, count in enumerate(pages)),
    }
    return Run(figures, [each.answer for each in requests])


def _serve(
    backend: str, model: TinyTransformer, lease: Lease, limits: BatchLimits, prompts: list[Tokens], counts: list[int]
) -> tuple[list[Request], float, BatchCounters, MeteredWorker]:
    with lease.attach() as pool:
        kind = StreamWorker if backend == "cuda" else PoolWorker
        worker = MeteredWorker(kind(model, pool))
        engine = BatchEngine(worker, lease, limits)
        began = time.perf_counter()
        requests = engine.run(prompts, counts)
        return requests, time.perf_counter() - began, engine.counters, worker


def show(rows: list[dict[str, object]]) -> None:
    """The table."""
    print(f"{'windowed':>8}{'tok/s off':>11}{'on':>9}{'gain':>9}{'running':>16}{'preempted':>12}{'hit tokens':>16}")
    for row in rows:
        off, on = row["off"], row["on"]
        assert isinstance(off, dict)
        assert isinstance(on, dict)
        running = f"{off['mean_running']:.1f} -> {on['mean_running']:.1f}"
        preempted, hits = (f"{off[name]} -> {on[name]}" for name in ("preemptions", "hit_tokens"))
        print(
            f"{row['share']:8.0%}{off['output_tokens_per_s']:11.1f}{on['output_tokens_per_s']:9.1f}"
            f"{row['gain_percent']:+8.1f}%{running:>16}{preempted:>12}{hits:>16}"
        )
    print("answers with and without recycling: the same, to the token")


def result_of(backend: str, arrays: Arrays, scale: Scale, rows: list[dict[str, object]]) -> dict[str, object]:
    """Contents of the result file: the rows and their parameters."""
    return {
        "backend": backend,
        "arithmetic": arrays.label,
        "rows": rows,
        "answers_equal": True,
        "settings": {
            "seed": SEED,
            "requests": scale.requests,
            "mean_in": scale.mean_in,
            "mean_out": scale.mean_out,
            "shared_tokens": scale.shared_tokens,
            "window_tokens": scale.window_tokens,
            "block_tokens": BLOCK_TOKENS,
            "step_tokens": scale.step_tokens,
            "pool_bytes": scale.pool_bytes,
            "layers": scale.layers,
            "kv_heads": scale.kv_heads,
            "head_dim": scale.head_dim,
            "d_model": scale.d_model,
            "preemption": "recompute",
            "lanes": arrays.lanes,
        },
    }


if __name__ == "__main__":
    main()
