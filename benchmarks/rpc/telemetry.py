"""Cost of telemetry and access control to a Step and a Match: ``python -m benchmarks.rpc.telemetry --json OUT``.

One daemon for each variant, all with the same flags but the variant's, and one client that takes turns with them: short
rounds of Steps of 32 growing sequences and of Matches of 2,048 resident blocks, the order of the variants turning from
round to round. So other load of the machine affects all alike, and the figure is the median over rounds of a
variant's p50 against the plain daemon's in the same round. ``metrics``: scraped every second by another process.
``otlp``: metrics and a tracer, untraced calls, and a collector that is away. ``traced``: every call sampled,
a Step's operations as events. ``tokens``: a token, and a quota of each kind that never bites.
"""

from __future__ import annotations

import gc
import hashlib
import os
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
from cachesvc_client import CacheClient, Lease, opaque
from cachesvc_client.sequence import StepStream
from cachesvc_ctl.core.daemon_process import DaemonProcess

from benchmarks.support.calls import Beside, compute, match_ms
from benchmarks.support.daemon_log import event_of
from benchmarks.support.recording import parser_of, save

SEQUENCES = 32
BLOCK_TOKENS = 64
DEVICE_BLOCKS = 32768
MATCHED_BLOCKS = 2048
MATCHES = 5
FLAGS = ("--backend", "shm", "--device-pool", "256MiB", "--host-pool", "0", "--drain-seconds", "0")
NO_COLLECTOR = "http://127.0.0.1:9"
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "metrics": ("--metrics-listen", "127.0.0.1:0"),
    "otlp": ("--metrics-listen", "127.0.0.1:0", "--otlp-endpoint", NO_COLLECTOR),
    "traced": ("--metrics-listen", "127.0.0.1:0", "--otlp-endpoint", NO_COLLECTOR),
    "tokens": (),
}
CALLS = ("step", "match")
TOKEN = "a-token-of-an-engine-0123456789"
TOKENS = f"""
[[token]]
name = "engine"
sha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"
scopes = ["engine"]
tenant = "a"
[quota.tenants.a]
device_bytes = "1TiB"
host_bytes = "1TiB"
models = 8
leases = 8
pages = 4194304
sequences = 65536
private_pages = 4194304
calls_per_second = 1000000
operations_per_second = 100000000
bytes_per_second = "1TiB"
calls_in_flight = 1024
"""
Times = dict[str, dict[str, list[float]]]


def main() -> None:
    """Print the table and write JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--steps", type=int, default=40, help="Steps of a round and variant")
    arguments = parser.parse_args()
    os.environ["OTEL_METRIC_EXPORT_INTERVAL"] = "1000"
    gc.freeze()
    with ExitStack() as stack:
        rigs = {name: stack.enter_context(Rig(name, flags)) for name, flags in VARIANTS.items()}
        for rig in rigs.values():
            rig.round(arguments.steps)
        times = measure(rigs, arguments.rounds, arguments.steps)
    result = {"rounds": arguments.rounds, "steps": arguments.steps, **summary(times)}
    for name, row in result["variants"].items():
        for call, found in row.items():
            print(f"{name:10}{call:6}p50 {found['p50_ms']:7.3f} ms   against plain {found['cost_percent']:+6.2f} %")
    save(arguments, result)


def measure(rigs: dict[str, Rig], rounds: int, steps: int) -> Times:
    """p50 of each round in milliseconds, by variant and call."""
    times: Times = {name: {call: [] for call in CALLS} for name in rigs}
    names = list(rigs)
    for turn in range(rounds):
        shift = turn % len(names)
        order = names[shift:] + names[:shift]
        for name in order if turn % 2 else reversed(order):
            for call, taken in zip(CALLS, rigs[name].round(steps), strict=True):
                times[name][call].append(taken)
    return times


def summary(times: Times) -> dict[str, Any]:
    """Medians over rounds, and the spread of the cost."""
    rows: dict[str, dict[str, Any]] = {}
    for name, calls in times.items():
        rows[name] = {}
        for call, found in calls.items():
            costs = sorted(100 * (one / plain - 1) for one, plain in zip(found, times["plain"][call], strict=True))
            rows[name][call] = {
                "p50_ms": statistics.median(found),
                "cost_percent": statistics.median(costs),
                "cost_percent_quartiles": [costs[len(costs) // 4], costs[3 * len(costs) // 4]],
            }
    return {"sequences": SEQUENCES, "matched_blocks": MATCHED_BLOCKS, "variants": rows}


class Rig:
    """A daemon, a client with a stream of Steps, and the process that scrapes the daemon."""

    def __init__(self, name: str, flags: Sequence[str]) -> None:
        self._name = name
        self._stack = ExitStack()
        self._token: str | None = None
        if name == "tokens":
            self._token = TOKEN
            flags = [*flags, "--tokens", self._tokens_file()]
        self._daemon = DaemonProcess([*FLAGS, *flags])
        self._rng = np.random.default_rng(7)
        self._keys = self._rng.bytes(32 * MATCHED_BLOCKS)
        self._lease: Lease
        self._stream: StepStream

    def __enter__(self) -> Rig:
        if self._name == "traced":
            os.environ["OTEL_TRACES_SAMPLER"] = "always_on"
        try:
            self._stack.enter_context(self._daemon)
        finally:
            os.environ.pop("OTEL_TRACES_SAMPLER", None)
        ready = event_of(self._daemon, "ready")
        if ready["metrics_port"]:
            self._stack.enter_context(Beside(scrape, ready["metrics_port"]))
        client = self._stack.enter_context(CacheClient(self._daemon.socket, engine="bench", token=self._token))
        layout = opaque(block_bytes=4096, block_tokens=BLOCK_TOKENS)
        registration = client.register("bench", layout, device_pages=[DEVICE_BLOCKS], host_pages=[0])
        self._lease = self._stack.enter_context(client.open_lease(registration))
        self._stream = self._stack.enter_context(self._lease.step(stock_pages=2 * SEQUENCES))
        self._stream.submit()
        compute(self._lease, self._keys)
        return self

    def _tokens_file(self) -> str:
        file = Path(self._stack.enter_context(tempfile.TemporaryDirectory())) / "tokens.toml"
        file.touch(mode=0o600)
        file.write_text(TOKENS, encoding="utf-8")
        return str(file)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def round(self, steps: int) -> tuple[float, float]:
        """Milliseconds, p50 of ``steps`` Steps in which each sequence grows by a block and seals one, and of some
        Matches."""
        sequences = [self._lease.match(self._rng.bytes(32 * (steps + 1))) for _ in range(SEQUENCES)]
        times = []
        for turn in range(steps):
            batch = self._stream.batch()
            self._stream.grow_all(sequences)
            if turn:
                batch.publish_all(sequences, turn)
            began = time.perf_counter()
            results = self._stream.submit(batch)
            times.append((time.perf_counter() - began) * 1e3)
            assert not any(isinstance(result, Exception) for result in results), results
        for sequence in sequences:
            sequence.release()
        return statistics.median(times), statistics.median(
            match_ms(self._lease, self._keys, MATCHED_BLOCKS) for _ in range(MATCHES)
        )


def scrape(stop: Event, pipe: Connection, port: int) -> None:
    """Read the page every second, as no Prometheus would."""
    pipe.send("ready")
    while not stop.wait(1.0):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            page.read()


if __name__ == "__main__":
    main()
