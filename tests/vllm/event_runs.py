"""Random loads whose KV events are held against what a match finds.

    python -m tests.vllm.event_runs SOCKET SEED FOLDER RESETS DEATHS

Two engines share a pool. Each publishes by vLLM's own publisher; an index for each, as routers have it, is built from
that alone and asked by tokens. Of every request that an engine has had, the index must then say, block by block, what a
match finds on the device and on the host. RESETS: how likely new weights are in an iteration. DEATHS: how
often the daemon dies and comes back.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq
from cachesvc_client import CacheClient, Lease

from tests.vllm.scheduling import Engine
from tests.vllm.scheduling_runs import STUCK_S, serve, tell
from tests.vllm.shape import BLOCK_TOKENS, Shape

Chain = tuple[tuple[int, ...], ...]
"""Tokens of a block and of all before it, block by block."""


class Index:
    """Blocks and tokens of an engine, by its events."""

    def __init__(self, context: Any, endpoint: str) -> None:
        self._socket = context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.reconnect_ivl = 1
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(endpoint)
        self._chains: dict[int, Chain] = {}
        self._at: dict[str, set[Chain]] = {}
        self._number = -1
        self.events = 0

    @property
    def is_empty(self) -> bool:
        """True where the engine has nothing."""
        return not any(self._at.values())

    def wait_connected(self) -> None:
        """Wait for the publisher: what it sends before is lost."""
        assert self._monitor.poll(STUCK_S * 1000), "no publisher"
        self._socket.disable_monitor()

    def listen(self, timeout_ms: int) -> None:
        """Take what has come."""
        while self._socket.poll(timeout_ms):
            _, number, payload = self._socket.recv_multipart()
            seen = int.from_bytes(number, "big")
            assert self._number == seen - 1, "no batch was lost"
            self._number = seen
            for event in msgspec.msgpack.decode(payload)[1]:
                self.events += 1
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self._at.clear()
            return
        there = self._at.setdefault(event["medium"], set())
        if event["type"] == "BlockRemoved":
            there -= {self._chains[each] for each in event["block_hashes"]}
            return
        parent = event["parent_block_hash"]
        chain: Chain = () if parent is None else self._chains[parent]
        tokens, size = event["token_ids"], event["block_size"]
        assert len(tokens) == size * len(event["block_hashes"])
        for at, each in enumerate(event["block_hashes"]):
            chain = (*chain, tuple(tokens[at * size : (at + 1) * size]))
            self._chains[each] = chain
            there.add(chain)

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Leading blocks on the device, and those behind them on the host."""
        blocks = tuple(tuple(tokens[at : at + BLOCK_TOKENS]) for at in range(0, len(tokens), BLOCK_TOKENS))
        device, host = self._at.get("GPU", set()), self._at.get("CPU", set())
        near = next((n for n in range(len(blocks)) if blocks[: n + 1] not in device), len(blocks))
        far = next((n for n in range(near, len(blocks)) if blocks[: n + 1] not in host), len(blocks))
        return near, far - near


def matched(engine: Engine, lease: Lease, hashes: Sequence[bytes]) -> tuple[int, int]:
    """Blocks that the daemon finds for this engine."""
    keys = engine.connector._scheduler._book.keys(hashes, b"")  # noqa: SLF001 - vLLM need not know
    with lease.match(keys) as sequence:
        return sequence.device_blocks, sequence.host_blocks


def unlike(engine: Engine, index: Index, lease: Lease) -> list[Any]:
    """Requests of which the index says something else than the daemon."""
    found = []
    for name, request in engine.requests.items():
        hashes = list(request.block_hashes)
        tokens = list(request.all_token_ids)[: len(hashes) * BLOCK_TOKENS]
        said, true = index.find(tokens), matched(engine, lease, hashes)
        if said != true:
            found.append((name, said, true))
    return found


@contextmanager
def asking(socket: str, shape: Shape) -> Iterator[Lease]:
    """A lease of the engines' model, to match with."""
    with CacheClient(socket) as client:
        registration = client.register("m", shape.layout, device_pages=[shape.pages], reserved_pages=1)
        assert registration.existed, "the engines' model"
        with client.open_lease(registration) as lease:
            yield lease


def die(engines: Sequence[Engine], indexes: Sequence[Index], rng: random.Random) -> None:
    """The daemon dies, and routers know; it comes back, and engines go on with it."""
    tell("kill")
    serve(engines, rng, 5)
    for index in indexes:
        while not index.is_empty:
            index.listen(20)
    tell("start")
    while any(engine.is_adrift for engine in engines):
        serve(engines, rng, 2)


def main() -> None:
    """Run, compare, and tell."""
    socket, seed, folder, resets, deaths = sys.argv[1:]
    shape = Shape(events=folder)
    context = zmq.Context()
    indexes = [Index(context, f"ipc://{folder}/e{each}") for each in range(2)]
    engines = [Engine(f"e{each}", socket, int(seed) + each, shape) for each in range(2)]
    for index in indexes:
        index.wait_connected()
    told = {"requests": 0, "device": 0, "host": 0}
    for round_ in range(3):
        rng = random.Random(int(seed) + round_)
        serve(engines, rng, 200, resets=float(resets))
        if round_ < int(deaths):
            die(engines, indexes, rng)
            serve(engines, rng, 100)
        with asking(socket, shape) as lease:
            for engine, index in zip(engines, indexes, strict=True):
                since_s = time.monotonic()
                while wrong := unlike(engine, index, lease):
                    index.listen(20)
                    assert time.monotonic() - since_s < STUCK_S, wrong[:5]
    with asking(socket, shape) as lease:
        for engine in engines:
            finds = [matched(engine, lease, request.block_hashes) for request in engine.requests.values()]
            told["requests"] += len(finds)
            told["device"] += sum(device for device, _ in finds)
            told["host"] += sum(host for _, host in finds)
    told["events"] = sum(index.events for index in indexes)
    for engine in engines:
        assert engine.leftovers() == {}, engine.leftovers()
        engine.close()
    context.destroy(linger=0)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
