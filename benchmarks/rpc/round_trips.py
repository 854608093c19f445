"""Round trips of the client against a real daemon over the unix socket: ``python -m benchmarks.rpc --json OUT``.

Everything by both ways, the lane and gRPC, one right after the other: the result has a key for each, with the same keys
below it. ``ping``: an empty call (on gRPC a health check). ``match``: a prompt that is resident whole, 64 tokens a
block, with its keys at hand and with hashing it anew; ``match_window``: of a model with a windowed group, keys at hand.
``step``: an iteration of k sequences that each take one more block from the stock, in one call; ``step_publish``: each
also seals a block; ``step_ahead``: the same, sent before kernels that run 5 ms and taken behind them; ``step_paced``:
32 of those once in 10 ms by each of 16 engines that began at random moments. Everything is measured while another
process keeps the copy streams busy (``--quiet``: with idle streams too), with 1, 4 and 16 client processes.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

import grpc
import numpy as np
from cachesvc_client import (
    CacheClient,
    CacheClientError,
    Lease,
    PoolExhausted,
    Sequence,
    StepStream,
    StockEmpty,
    Transport,
    block_keys,
    gqa_windowed,
    opaque,
)
from cachesvc_client.wire.life import LifeConnection
from cachesvc_client.wire.transports import BlockingLane
from cachesvc_ctl.core.daemon_process import DaemonProcess
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.support.calls import Beside, compute, leased, spread, timed_ms
from benchmarks.support.daemon_log import event_of
from benchmarks.support.recording import parser_of, save

WAYS = {"lane": Transport.AUTO, "grpc": Transport.GRPC}
BLOCK_TOKENS = 64
TOKENS = (1024, 8192, 32768, 131072)
SEQUENCES = (1, 8, 32)
BLOCK_BYTES = 4096
DEVICE_BLOCKS = 98304
SWAP_BLOCK_BYTES = 1 << 18
WINDOW_TOKENS = 1024
WINDOW_BLOCKS = 4096
WINDOWED = gqa_windowed(
    window_layers=[False, True], kv_heads=1, head_dim=8, block_tokens=BLOCK_TOKENS, window_tokens=WINDOW_TOKENS
)
KERNELS_SECONDS = 0.005
"""Time of an iteration's kernels while its step is in flight."""
PACED_ENGINES = 16
PACED_SECONDS = 0.01
PACED_STEPS = 48
"""Steps of each of a few rounds: with 32 sequences of 16 engines they fill three quarters of the pool."""
PACED_ROUNDS = 4
CALL_SECONDS = 30.0
FLAGS = ["--backend", "shm", "--device-pool", "1GiB", "--host-pool", "512MiB", "--metrics-listen", "127.0.0.1:0"]
LOOP_LONGEST = re.compile(r'^cachesvc_loop_longest_seconds\{flow="([^"]+)"\} (\S+)$', re.MULTILINE)
FOR_SCALE_MS = {
    "LMCache 0.5.6, 2 cores": {"131072": 53.0},
    "a cache in Rust, 16 cores": {"1024": 0.17, "8192": 0.22, "32768": 0.36, "131072": 0.90},
}
"""Time that other systems take to look up that number of tokens, 64 a block; measured 2026-11."""
Figures = dict[str, float]


def main() -> None:
    """Print the tables and write JSON."""
    parser = parser_of(__doc__, "python -m benchmarks.rpc")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=200, help="calls of each kind and client")
    parser.add_argument("--quiet", action="store_true", help="also measure without swaps")
    parser.add_argument("--daemon", default="", help="further flags of the daemon")
    arguments = parser.parse_args()
    ways: dict[str, dict[str, object]] = {way: {} for way in WAYS}
    result: dict[str, object] = {"block_tokens": BLOCK_TOKENS, **ways}
    if arguments.daemon:
        result["daemon"] = arguments.daemon
    longest: dict[str, float] = {}
    with DaemonProcess([*FLAGS, *arguments.daemon.split()]) as daemon:
        if arguments.quiet:
            for way, figures in ways.items():
                figures["without_swaps"] = run(daemon.socket, way, 1, arguments.rounds)
                keep_longest(longest, daemon)
                show(f"{way}, 1 client, streams idle", figures["without_swaps"])
        with Beside(keep_swapping, daemon.socket):
            by_clients: dict[str, dict[str, dict[str, object]]] = {way: {} for way in WAYS}
            for clients in arguments.clients:
                for way, found in by_clients.items():
                    found[str(clients)] = run(daemon.socket, way, clients, max(20, arguments.rounds // clients))
                    keep_longest(longest, daemon)
                    show(f"{way}, {clients} client(s), while swaps run", found[str(clients)])
            for way, figures in ways.items():
                figures.update(next(iter(by_clients[way].values())))
                figures["by_clients"] = by_clients[way]
                if max(arguments.clients) >= PACED_ENGINES:
                    paced = run_processes(daemon.socket, way, PACED_ENGINES, PACED_ROUNDS, pace)
                    figures["step_paced_ms"] = {str(PACED_ENGINES): spread(paced["step"])}
                    _line(f"{way}, {PACED_ENGINES} engines, a step each 10 ms", spread(paced["step"]))
                    keep_longest(longest, daemon)
        keep_longest(longest, daemon)
    result["loop_longest_by_flow_ms"] = longest = dict(sorted(longest.items(), key=lambda each: -each[1]))
    result["loop_longest_ms"] = max(longest.values())
    result["for_scale_ms"] = FOR_SCALE_MS
    print(f"\nlongest hold of the loop, ms: {', '.join(f'{flow} {ms:.2f}' for flow, ms in longest.items())}")
    print("for scale, p50 ms of a look-up:")
    for other, look_ups in FOR_SCALE_MS.items():
        print(f"{other:34}" + ", ".join(f"{int(tokens):,} tokens {ms:.2f}" for tokens, ms in look_ups.items()))
    save(arguments, result)


def show(title: str, figures: object) -> None:
    """One table of p50 and p99 in milliseconds."""
    assert isinstance(figures, dict)
    print(f"\n{title:34}{'p50 ms':>10}{'p99 ms':>10}")
    _line("ping", figures["ping_ms"])
    for tokens, row in figures["match_ms"].items():
        _line(f"match {int(tokens):,} tokens, keys ready", row["keys_ready"])
        _line(f"match {int(tokens):,} tokens, hashing", row["with_hashing"])
    for tokens, row in figures["match_window_ms"].items():
        _line(f"match {int(tokens):,} tokens, one window", row["keys_ready"])
    for kind in ("step", "step_publish", "step_ahead"):
        for count, row in figures[f"{kind}_ms"].items():
            _line(f"{kind} {count}", row)


def _line(name: str, figures: Figures) -> None:
    print(f"{name:34}{figures['p50']:10.2f}{figures['p99']:10.2f}", flush=True)


def keep_longest(longest: dict[str, float], daemon: DaemonProcess) -> None:
    """The daemon tells of the last minute or two alone: keep the longest of the whole run."""
    for flow, ms in loop_longest_ms(daemon).items():
        longest[flow] = max(ms, longest.get(flow, 0.0))


def loop_longest_ms(daemon: DaemonProcess) -> dict[str, float]:
    """Longest recent hold of the daemon's event loop by each flow, by the clock."""
    with urllib.request.urlopen(f"http://127.0.0.1:{event_of(daemon, 'ready')['metrics_port']}/metrics") as page:
        found = LOOP_LONGEST.findall(page.read().decode())
    return {flow: float(seconds) * 1e3 for flow, seconds in found}


def keep_swapping(stop: Event, ready: Connection, socket: str) -> None:
    """Swap a sequence of 64 MiB out and in, over and over."""
    layout = opaque(block_bytes=SWAP_BLOCK_BYTES, block_tokens=BLOCK_TOKENS)
    with leased(socket, layout, 512, 512, "swapper") as lease:
        sequence = lease.match(b"")
        sequence.allocate(256)
        while not swapped_out(sequence):
            stop.wait(0.05)  # the host pool is still arriving
        ready.send("swapping")
        sequence.wait_swapped(30)
        sequence.swap_in()
        sequence.wait_swapped(30)
        while not stop.is_set():
            sequence.swap_out()
            sequence.wait_swapped(30)
            sequence.swap_in()
            sequence.wait_swapped(30)
        sequence.release()


def swapped_out(sequence: Sequence) -> bool:
    """Try to start the first swap; False while the host has no room yet."""
    try:
        sequence.swap_out()
    except PoolExhausted:
        return False
    return True


def run(socket: str, way: str, clients: int, rounds: int) -> dict[str, object]:
    """Figures of ``clients`` processes at once; p50 and p99 over all their calls."""
    merged = run_processes(socket, way, clients, rounds, work)
    return {
        "ping_ms": spread(merged["ping"]),
        "match_ms": {
            str(n): {"with_hashing": spread(merged[f"hash {n}"]), "keys_ready": spread(merged[f"match {n}"])}
            for n in TOKENS
        },
        "match_window_ms": {str(n): {"keys_ready": spread(merged[f"window {n}"])} for n in TOKENS},
        "step_ms": {str(k): spread(merged[f"step {k}"]) for k in SEQUENCES},
        "step_publish_ms": {str(k): spread(merged[f"step_publish {k}"]) for k in SEQUENCES},
        "step_ahead_ms": {str(k): spread(merged[f"step_ahead {k}"]) for k in SEQUENCES[-1:]},
    }


Times = dict[str, list[float]]
Work = Callable[[str, str, int, int, object], Times]


def run_processes(socket: str, way: str, clients: int, rounds: int, job: Work) -> Times:
    """Merged times of ``clients`` processes that ran all at once."""
    context = mp.get_context("spawn")
    barrier = context.Barrier(clients)
    pipes = [context.Pipe() for _ in range(clients)]
    workers = [
        context.Process(target=_report, args=(job, (socket, way, number, rounds, barrier), theirs))
        for number, (_, theirs) in enumerate(pipes)
    ]
    for worker in workers:
        worker.start()
    answers: list[Times] = [mine.recv() for mine, _ in pipes]
    for worker in workers:
        worker.join()
    return {name: [ms for answer in answers for ms in answer[name]] for name in answers[0]}


def _report(job: Work, arguments: tuple[str, str, int, int, object], answer: Connection) -> None:
    gc.freeze()  # as serving engines do: else the client's own collector, 20 ms, is what p99 shows
    answer.send(job(*arguments))


def work(socket: str, way: str, number: int, rounds: int, barrier: object) -> Times:
    """One client process: sets up, waits for the others, measures."""
    layout = opaque(block_bytes=BLOCK_BYTES, block_tokens=BLOCK_TOKENS)
    tokens = np.random.default_rng(7).integers(0, 128_000, max(TOKENS), dtype=np.uint32)
    times: Times = {}
    with CacheClient(socket, engine=f"bench {number}", transport=WAYS[way]) as client, pinging(socket, way) as ping:
        assert client.transport == way
        registration = client.register("bench", layout, device_pages=[DEVICE_BLOCKS], host_pages=[0])
        windowed = client.register(
            "bench windowed", WINDOWED, device_pages=[WINDOW_BLOCKS] * len(WINDOWED.groups), host_pages=[0, 0]
        )
        with client.open_lease(registration) as lease, client.open_lease(windowed) as other:
            compute(lease, block_keys(registration.namespace, tokens, BLOCK_TOKENS))
            compute(other, block_keys(windowed.namespace, tokens, BLOCK_TOKENS))
            barrier.wait()  # type: ignore[attr-defined]
            times["ping"] = repeat(rounds, ping)
            for count in TOKENS:
                keys = block_keys(registration.namespace, tokens[:count], BLOCK_TOKENS)
                times[f"match {count}"] = match_times(lease, rounds, lambda keys=keys: keys)  # type: ignore[misc]
                hashing = lambda n=count: block_keys(registration.namespace, tokens[:n], BLOCK_TOKENS)  # noqa: E731
                times[f"hash {count}"] = match_times(lease, rounds, hashing)
                keys = block_keys(windowed.namespace, tokens[:count], BLOCK_TOKENS)
                times[f"window {count}"] = match_times(other, rounds, lambda keys=keys: keys)  # type: ignore[misc]
            for count in SEQUENCES:
                times[f"step {count}"] = step_times(lease, count, rounds, publish=False)
                times[f"step_publish {count}"] = step_times(lease, count, rounds, publish=True)
            count = SEQUENCES[-1]
            times[f"step_ahead {count}"] = step_times(lease, count, rounds, publish=True, kernels_s=KERNELS_SECONDS)
    return times


def pace(socket: str, way: str, number: int, rounds: int, barrier: object) -> Times:
    """One of several engines that each take a step of 32 publishing sequences once in 10 ms."""
    layout = opaque(block_bytes=BLOCK_BYTES, block_tokens=BLOCK_TOKENS)
    with CacheClient(socket, engine=f"bench {number}", transport=WAYS[way]) as client:
        registration = client.register("bench", layout, device_pages=[DEVICE_BLOCKS], host_pages=[0])
        times: list[float] = []
        with client.open_lease(registration) as lease:
            for _ in range(rounds):
                barrier.wait()  # type: ignore[attr-defined]
                times += step_times(lease, SEQUENCES[-1], PACED_STEPS, publish=True, every_s=PACED_SECONDS)
    return {"step": times}


@contextmanager
def pinging(socket: str, way: str) -> Iterator[Callable[[], object]]:
    """An empty call by this way."""
    if way == "grpc":
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            yield lambda: health.Check(health_pb2.HealthCheckRequest())
        return
    life = LifeConnection(socket, CALL_SECONDS, lambda: None)
    life.start()
    lane = BlockingLane(life.fetch_lane())
    try:
        lane.greet((), CALL_SECONDS)
        yield lambda: lane.ping(CALL_SECONDS)
    finally:
        lane.close()
        life.close()


def repeat(rounds: int, call: Callable[[], object]) -> list[float]:
    """Milliseconds of each call, after a few to warm up."""
    for _ in range(5):
        call()
    return [timed_ms(call) for _ in range(rounds)]


def match_times(lease: Lease, rounds: int, keys_of: Callable[[], bytes]) -> list[float]:
    """Milliseconds from tokens (or keys) to the pinned hit with its block table; the release is not counted."""
    out = []
    for _ in range(rounds):
        began = time.perf_counter()
        sequence = lease.match(keys_of())
        out.append((time.perf_counter() - began) * 1e3)
        assert sequence.device_blocks > 0
        sequence.release()
    return out


def step_times(
    lease: Lease, count: int, rounds: int, *, publish: bool, every_s: float = 0.0, kernels_s: float = 0.0
) -> list[float]:
    """Milliseconds that an engine waits for the step of an iteration of ``count`` growing sequences.

    Where the stock is short the wait for more of it counts. ``every_s``: from one step to the next. ``kernels_s``: how
    long kernels run between sending and taking the answer.
    """
    rng = np.random.default_rng()
    turns = min(rounds, DEVICE_BLOCKS // 12 // count)
    sequences = [lease.match(rng.bytes(32 * (rounds + 8))) for _ in range(count)]
    for sequence in sequences:
        sequence.allocate(1)  # on a full pool the stock is replaced by as much as the engine has grown
    out = []
    with lease.step(stock_pages=2 * count) as stream:
        stream.submit()
        next_s = time.perf_counter() + rng.uniform(0, every_s)
        for turn in range(turns):
            time.sleep(max(next_s - time.perf_counter(), 0))  # engines begin an iteration so often
            next_s += every_s
            began = time.perf_counter()
            while not grow_all(stream, sequences):
                stream.submit()  # a full pool is evicted for the stock a turn's worth at a time
            batch = stream.batch()
            if publish and turn > 0:
                batch.publish_all(sequences, turn)
            pending = stream.send(batch)
            sent = time.perf_counter()
            if kernels_s:
                time.sleep(kernels_s)  # as long as kernels would run
            resumed = time.perf_counter()
            answers = pending.results()
            out.append((time.perf_counter() - resumed + sent - began) * 1e3)
            assert not any(isinstance(each, CacheClientError) for each in answers), answers
        batch = stream.batch()
        for sequence in sequences:
            batch.release(sequence)
        stream.submit(batch)
    return out


def grow_all(stream: StepStream, sequences: list[Sequence]) -> bool:
    """Grow each sequence by a block; False where the stock is short."""
    try:
        stream.grow_all(sequences)
    except StockEmpty:
        return False
    return True


if __name__ == "__main__":
    main()
