"""A vLLM engine and an SGLang engine on one daemon, without models: ``python -m benchmarks.sglang.beside --json OUT``.

Each kind is a process with the page accounting of its connector (``PageBook``) and the layout of its pages, of the same
8B Llama shape: it matches and admits prompts, has a batch decode, and sends a step an iteration. Steps are timed from
``flush`` to the last answer, of each kind alone and beside the other one, in turns; the other one is idle meanwhile.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import random
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from cachesvc_client import CacheClient
from cachesvc_client.plugins.page_book import PageBook
from cachesvc_client.plugins.request_pages import RequestPages, Wish
from cachesvc_ctl.core.daemon_process import DaemonProcess

from benchmarks.support.calls import spread
from benchmarks.support.machine import describe_machine
from benchmarks.support.recording import write_result
from cachesvc.model.layout import Layout, Plane, PlaneGroup

LAYERS, HEADS, WIDTH = 32, 8, 128
POOL_BLOCKS = 2_048
SCALE = 64
"""Bytes of a page are a 64th of the shape's: the daemon's work does not depend on them, copies of the host do."""

RUNNING = 32
PROMPT_BLOCKS = 16
NEW_BLOCKS = 4
HEADS_OF_PROMPTS = 64
PACE_S = 0.005
"""Time that the model would compute in an iteration."""

WARM_S = 2.0


def layout_of(kind: str) -> Layout:
    """Layout of a kind's pages: K and V apart token by token (SGLang), or together head by head (vLLM)."""
    tokens, width = {"sglang": 64, "vllm": 16}[kind], WIDTH // SCALE
    shapes = {
        "sglang": {"k": (tokens, HEADS, width), "v": (tokens, HEADS, width)},
        "vllm": {"kv": (HEADS, tokens, 2 * width)},
    }
    planes = [
        Plane(name, layer, "full", shape, "bfloat16") for layer in range(LAYERS) for name, shape in shapes[kind].items()
    ]
    return Layout(tokens, 1, (PlaneGroup("full"),), tuple(planes))


class Engine:
    """A batch of requests that decode; one that ends makes room for the next prompt, which begins as others did."""

    def __init__(self, book: PageBook, seed: int) -> None:
        self._book = book
        self._rng = random.Random(seed)
        self._heads = [[self._rng.randbytes(32) for _ in range(PROMPT_BLOCKS // 2)] for _ in range(HEADS_OF_PROMPTS)]
        self._running: list[tuple[RequestPages, list[bytes]]] = []
        self._number = 0

    def iterate(self) -> float:
        """Seconds until the step of an iteration has its answer."""
        self._admit()
        ended = self._rng.randrange(len(self._running)) if len(self._running) == RUNNING else None
        for at, (pages, hashes) in enumerate(self._running):
            if self._rng.random() < NEW_BLOCKS / PROMPT_BLOCKS and self._book.reserve(pages, pages.taken + 1):
                self._book.take(pages, 1)
                hashes.append(self._rng.randbytes(32))
                self._book.seal(pages, pages.taken - 1, hashes)
            if at == ended:
                self._book.drop(pages, pages.held)
        if ended is not None:
            del self._running[ended]
        self._book.begin_step()
        began_s = time.perf_counter()
        self._book.flush()
        self._book.outbox.wait()
        took_s = time.perf_counter() - began_s
        self._book.untold.begin_output()
        self._book.untold.end_output(computes=False)
        return took_s

    def _admit(self) -> None:
        hashes = [*self._rng.choice(self._heads), *(self._rng.randbytes(32) for _ in range(PROMPT_BLOCKS // 2))]
        self._number += 1
        pages = self._book.begin(str(self._number), Wish(hashes, PROMPT_BLOCKS - 1, PROMPT_BLOCKS))
        if not self._book.reserve(pages, PROMPT_BLOCKS):
            self._book.forget(pages.request_id)
            return
        self._book.use_hits(pages)
        self._book.take(pages, PROMPT_BLOCKS - pages.taken)
        self._book.seal(pages, PROMPT_BLOCKS - 1, hashes)
        self._running.append((pages, hashes))


def serve(connection: Connection, socket: str, kind: str) -> None:
    """Be an engine: seconds come in, and milliseconds of each iteration's step go out."""
    layout = layout_of(kind)
    with CacheClient(socket, engine=kind) as client:
        registration = client.register(kind, layout, device_pages=[POOL_BLOCKS], host_pages=[POOL_BLOCKS])
        lease = client.open_lease(registration)
        engine = Engine(PageBook(lease, 64, RUNNING * PROMPT_BLOCKS), seed=len(kind))
        connection.send("ready")
        while seconds := connection.recv():
            until_s, times = time.perf_counter() + seconds, list[float]()
            while time.perf_counter() < until_s:
                times.append(engine.iterate() * 1e3)
                time.sleep(PACE_S)  # kernels of the iteration would run meanwhile
            connection.send(times)


def measure(rounds: int, seconds: float) -> dict[str, Any]:
    """Run each kind alone, then both, ``rounds`` times; figures of all their steps, and the ratio of the 99th
    percentiles."""
    kinds, times = ("vllm", "sglang"), dict[str, dict[str, list[float]]]()
    context = mp.get_context("spawn")
    flags = ["--backend", "shm", "--device-pool", "2GiB", "--host-pool", "2GiB", "--write-policy", "write_through"]
    with DaemonProcess(flags) as daemon:
        ways = {kind: context.Pipe() for kind in kinds}
        made = [context.Process(target=serve, args=(ways[kind][1], daemon.socket, kind)) for kind in kinds]
        for process in made:
            process.start()
        mine = {kind: way for kind, (way, _) in ways.items()}
        for way in mine.values():
            way.recv()
        for turn in range(-1, rounds):
            for active in ((kinds[0],), (kinds[1],), kinds):
                for kind in active:
                    mine[kind].send(WARM_S if turn < 0 else seconds)
                for kind in active:
                    found = mine[kind].recv()
                    if turn >= 0:
                        label = "alone" if len(active) == 1 else "beside"
                        times.setdefault(kind, {}).setdefault(label, []).extend(found)
        for kind, process in zip(kinds, made, strict=True):
            mine[kind].send(0)
            process.join()
    return {kind: _figures(found) for kind, found in times.items()}


def _figures(found: dict[str, list[float]]) -> dict[str, Any]:
    told = {label: {"steps": len(each), **spread(each)} for label, each in found.items()}
    return {**told, "p99_ratio": round(told["beside"]["p99"] / told["alone"]["p99"], 3)}


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang.beside", description=__doc__)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each kind alone, and of both, in a round")
    options = parser.parse_args()
    found = {"machine": describe_machine(), "step_ms": measure(options.rounds, options.seconds)}
    print(found)
    if options.json:
        write_result(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
