"""``cachesvc events`` and ``cachesvc why`` against a real daemon, and routers at the other end of a real socket."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from cachesvc_client.adapters.kv_events import Event, KnownTokens, KvEventBridge, KvEventMapper, hash_of
from cachesvc_client.events import EventSubscriber
from cachesvc_ctl.main import main
from kvcache.v1 import admin_pb2

from tests.e2e.engine import BLOCK_TOKENS, PLAIN, Engine, prompt
from tests.e2e.remote import ROOT
from tests.e2e.rig import Node, running_node, wait_until

Run = Callable[..., tuple[int, str]]
WAIT_MS = 30_000


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in this process: exit code and what it printed."""

    def call(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["cachesvc", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(str(ended.value.code)), printed.out + printed.err

    return call


def hexes(engine: Engine, tokens: list[int]) -> list[str]:
    raw = engine.keys(tokens).hex()
    return [raw[at : at + 64] for at in range(0, len(raw), 64)]


def test_why_a_block_is_here(run: Run, node: Node) -> None:
    with Engine(node.socket, name="asker", host_pages=0) as engine:
        keys = hexes(engine, prompt(1, 3))
        engine.serve(prompt(1, 3))
        with engine.lease.match(engine.keys(prompt(1, 3))) as sequence:
            code, text = run("why", keys[0], "--socket", node.socket)
            assert code == 0
            assert "it stays: 0 pins on it, 1 on blocks below it" in text
            assert "replica 0" in text
            assert "through 2 blocks below" in text
            assert "published" in text
            assert "every change since the daemon started is known" in text
            code, raw = run("why", keys[2][:10], "--socket", node.socket, "--json")
            (story,) = json.loads(raw)["stories"]
            assert [holder["engine"] for holder in story["holders"]] == ["asker"]
            assert story["holders"][0]["sequence_id"] == sequence.id
            assert story["holders"][0]["blocks_below"] == 0
            assert story["block"]["copies"] == [{"place": "replica 0", "group": "full", "state": "READY", "page": 2}]
        code, text = run("why", keys[2], "--socket", node.socket)
        assert "nothing keeps it" in text


def test_why_a_block_is_not_here(run: Run, node: Node) -> None:
    with Engine(node.socket, device_pages=4, host_pages=0) as engine:
        keys = hexes(engine, prompt(1, 3))
        engine.serve(prompt(1, 3))
        engine.serve(prompt(2, 3))
        code, text = run("why", keys[2], "--socket", node.socket)
        assert code == 0
        assert "s ago it was evicted for others that needed the room" in text
        node.admin.Evict(admin_pb2.EvictRequest(model_id=1, tier="device"))
        code, text = run("why", keys[0], "--socket", node.socket)
        assert "s ago an operator evicted it" in text
        code, text = run("why", "00" * 32, "--socket", node.socket)
        assert code == 0
        assert "it is not here and never was" in text
        code, text = run("why", "0000", "--socket", node.socket)
        assert code == 1
        assert "no block that begins with 0000 is here" in text
        code, text = run("why", "0a", "--socket", node.socket)
        assert code == 2
        assert "'0a' is not 4 to 64 hexadecimal digits of a key" in text
        assert run("why", keys[0][:5], "--socket", node.socket)[0] == 0
        other = f"{keys[0][:4]}{int(keys[0][4], 16) ^ 1:x}"
        assert run("why", other, "--socket", node.socket)[0] == 1, "an odd last digit counts too"
        code, text = run("why", keys[0], "--socket", node.socket, "--model", "9")
        assert code == 2


def test_what_was_forgotten_is_said(run: Run) -> None:
    with running_node(["--event-history", "2"]) as node, Engine(node.socket, host_pages=0) as engine:
        engine.serve(prompt(1, 6))
        node.admin.Evict(admin_pb2.EvictRequest(model_id=1, tier="device"))
        _, text = run("why", hexes(engine, prompt(1, 6))[5], "--socket", node.socket)
        assert "none of the last 2 changes of its model was about it" in text
        assert "changes are known for the last" in text


def test_events_for_people_and_scripts(run: Run, node: Node) -> None:
    with Engine(node.socket, host_pages=0) as engine:
        keys = hexes(engine, prompt(1, 3))
        engine.serve(prompt(1, 3))
        code, text = run("events", "--socket", node.socket, "--count", "3")
        assert code == 0
        assert f"here: at replica 0, group 0: {keys[0][:16]} and 2 more" in text
        code, raw = run("events", "--socket", node.socket, "--count", "3", "--format", "json")
        (run_of_three,) = json.loads(raw.splitlines()[0])["runs"]
        assert run_of_three["keys"] == keys
        code, text = run("events", "--socket", node.socket, "--model", "7")
        assert code == 2
        assert "there is no model 7" in text
        code, text = run("events", "--socket", node.socket, "--zmq", "tcp://127.0.0.1:*")
        assert code == 2
        assert "--format vllm" in text


@contextmanager
def publishing(node: Node, *arguments: str) -> Iterator[str]:
    """``cachesvc events`` as a process; where it publishes."""
    command = [sys.executable, "-u", "-m", "cachesvc_ctl.main", "events", "--socket", node.socket]
    process = subprocess.Popen(
        [*command, "--format", "vllm", "--zmq", "tcp://127.0.0.1:*", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[2].rstrip(",")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Router:
    """A cache-aware router's state of a worker: hashes by medium, from batches without a gap."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.hashes: dict[str, set[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.next: int | None = None

    def listen(self) -> None:
        """Take one batch."""
        topic, number, payload = self.socket.recv_multipart()
        assert topic == b"kv@pod@model"
        seen = int.from_bytes(number, "big")
        assert self.next in (None, seen)
        self.next = seen + 1
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            self.take(event)

    def take(self, event: dict[str, Any]) -> None:
        """Apply one event."""
        if event["type"] == "AllBlocksCleared":
            self.hashes.clear()
        elif event["type"] == "BlockStored":
            self.hashes.setdefault(event["medium"], set()).update(event["block_hashes"])
            size = event["block_size"]
            for at, each in enumerate(event["block_hashes"] if event["token_ids"] else ()):
                self.tokens[each] = event["token_ids"][at * size : (at + 1) * size]
        else:
            self.hashes[event["medium"]] -= set(event["block_hashes"])


def test_a_router_behind_zeromq_sees_what_the_daemon_has(node: Node) -> None:
    with (
        Engine(node.socket, host_pages=0) as engine,
        publishing(node, "--topic", "kv@pod@model") as endpoint,
        zmq.Context() as context,
        context.socket(zmq.SUB) as socket,
    ):
        socket.rcvtimeo = WAIT_MS
        socket.subscribe(b"")
        socket.connect(endpoint)
        seed = 0
        while not socket.poll(100):  # until the subscription has reached the publisher
            seed += 1
            engine.serve(prompt(seed, 1))
        router = Router(socket)
        router.listen()
        keys = engine.keys(prompt(1000, 3))
        engine.serve(prompt(1000, 3))
        mine = {hash_of(keys[at : at + 32]) for at in range(0, len(keys), 32)}
        while not mine <= router.hashes.get("GPU", set()):
            router.listen()
        node.admin.Evict(admin_pb2.EvictRequest(model_id=1, tier="device"))
        while mine & router.hashes["GPU"]:
            router.listen()


def test_an_engine_that_publishes_itself_tells_tokens_too(node: Node) -> None:
    told = Router(None)
    with Engine(node.socket, device_pages=4, host_pages=16) as engine:
        tokens = KnownTokens()
        for seed in range(3):
            tokens.learn(engine.keys(prompt(seed, 3)), prompt(seed, 3), BLOCK_TOKENS)
            engine.serve(prompt(seed, 3))
        wait_until(lambda: node.pages("in_flight") == 0, "stores have ended")
        subscriber = EventSubscriber(node.socket, engine.registration.namespace)

        def publish(events: Sequence[Event]) -> None:
            for event in events:
                told.take(event)
            bridge.close()

        bridge = KvEventBridge(
            lambda: subscriber,
            KvEventMapper(engine.layout, tokens=tokens),
            publish,
        )
        bridge.run()
        blocks = node.admin.ListBlocks(admin_pb2.ListBlocksRequest(model_id=1, limit=4096)).blocks
        for place, medium in (("host", "CPU"), ("replica 0", "GPU")):
            there = {hash_of(b.key) for b in blocks if any(c.place == place for c in b.copies)}
            assert told.hashes[medium] == there
        key = engine.keys(prompt(2, 3))[32:64]
        assert told.tokens[hash_of(key)] == prompt(2, 3)[BLOCK_TOKENS : 2 * BLOCK_TOKENS]


def test_routers_forget_a_daemon_that_died_and_learn_of_its_successor(folder: Path) -> None:
    batches: queue.Queue[list[Event]] = queue.Queue()
    told = Router(None)

    def take_until(holds: Callable[[], bool]) -> None:
        while not holds():
            for event in batches.get(timeout=WAIT_MS / 1000):
                told.take(event)

    def follow(socket: str, namespace: bytes) -> KvEventBridge:
        return KvEventBridge(
            lambda: EventSubscriber(socket, namespace),
            KvEventMapper(PLAIN),
            lambda events: batches.put(list(events)),
            pause_s=0.01,
        )

    with running_node(folder=folder) as node:
        with Engine(node.socket, host_pages=0) as engine:
            engine.serve(prompt(1, 3))
            bridge = follow(node.socket, engine.registration.namespace)
            thread = threading.Thread(target=bridge.run)
            thread.start()
            take_until(lambda: len(told.hashes.get("GPU", ())) == 3)
        node.daemon.process.kill()
        node.daemon.process.wait()
        take_until(lambda: not told.hashes)
    with running_node(folder=folder) as node, Engine(node.socket, host_pages=0) as engine:
        engine.serve(prompt(2, 1))
        mine = {hash_of(engine.keys(prompt(2, 1)))}
        take_until(lambda: told.hashes.get("GPU") == mine)
        bridge.close()
        thread.join()
