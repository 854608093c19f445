"""Nodes whose engines publish KV events, and two real routers that listen to them."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cachesvc_client import KEY_BYTES, EventSubscriber
from cachesvc_client.adapters.kv_events import Event, KnownTokens, KvEventBridge, KvEventMapper
from cachesvc_client.adapters.zmq_events import ZmqPublisher

from tests.e2e.engine import BLOCK_TOKENS, Engine
from tests.e2e.remote import ROOT
from tests.e2e.rig import Node, running_node, short_folder, wait_until
from tests.routers.selection import ANSWER

PACKAGES_VARIABLE = "CACHESVC_ROUTERS"
"""The folder that the routers' packages are in."""

WAIT_S = 30.0
HOST_CREDIT, DISK_CREDIT = 0.5, 0.25
"""Cost of a token that has to be loaded, for a router of vLLM."""

DECISION = re.compile(r'KV prefix decision.*worker="([^"]+)".*credited_prefix_tokens=(\d+)')


def environment() -> dict[str, str]:
    """Environment of a router."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join((os.environ[PACKAGES_VARIABLE], str(ROOT)))}


class Worker:
    """An engine on a node of its own, which publishes its events. ``served``: keys of all that it computed; ``kept``:
    how many of these were announced on disk."""

    def __init__(self, node: Node, engine: Engine, publisher: ZmqPublisher) -> None:
        self.node, self.engine = node, engine
        self.endpoint, self.replay_endpoint = publisher.endpoint, publisher.replay_endpoint
        self.served: set[bytes] = set()
        self.kept = 0
        self._publisher = publisher
        self._tokens = KnownTokens()
        namespace = engine.registration.namespace
        self.bridge = KvEventBridge(
            lambda: EventSubscriber(node.socket, namespace, storage=True),
            KvEventMapper(engine.layout, replica=engine.registration.replica, tokens=self._tokens),
            self._publish,
        )

    def serve(self, prompt: Sequence[int]) -> None:
        """Compute what was not hit."""
        keys = self.engine.keys(prompt)
        self.served |= {keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)}
        self._tokens.learn(keys, prompt, BLOCK_TOKENS)
        assert not self.engine.serve(prompt).bad

    def match(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Blocks that the daemon finds on the device, and behind that on the host."""
        with self.engine.lease.match(self.engine.keys(prompt)) as sequence:
            return sequence.device_blocks, sequence.host_blocks

    def _publish(self, events: Sequence[Event]) -> None:
        stored = (event for event in events if event.get("medium") == "DISK" and event["type"] == "BlockStored")
        self.kept += sum(len(event["block_hashes"]) for event in stored)
        self._publisher.publish(events)

    def settle(self) -> None:
        """Wait until nothing is copied any more."""
        wait_until(lambda: self.node.pages("in_flight") == 0, "copies have ended")


@contextmanager
def workers(count: int, *flags: str, device_pages: int = 48, host_pages: int = 96) -> Iterator[list[Worker]]:
    """Nodes with an engine each."""
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            folder = stack.enter_context(short_folder())
            node = stack.enter_context(running_node(flags, folder=folder))
            engine = stack.enter_context(Engine(node.socket, device_pages=device_pages, host_pages=host_pages))
            publisher = stack.enter_context(ZmqPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"))
            worker = Worker(node, engine, publisher)
            thread = threading.Thread(target=worker.bridge.run)
            thread.start()
            stack.callback(thread.join)
            stack.callback(worker.bridge.close)
            made.append(worker)
        yield made


def random_prompts(seed: int, count: int) -> list[list[int]]:
    """Prompts that begin as others do, and part at any block."""
    dice = random.Random(seed)
    heads = [[dice.randrange(50_000) for _ in range(12 * BLOCK_TOKENS)] for _ in range(8)]
    prompts = []
    for _ in range(count):
        head = dice.choice(heads)[: dice.randint(0, 12) * BLOCK_TOKENS]
        prompts.append(head + [dice.randrange(50_000) for _ in range(dice.randint(1, 6) * BLOCK_TOKENS)])
    return prompts


class Selection:
    """Dynamo's router."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def add(self, number: int, worker: Worker) -> None:
        """Follow a worker's events."""
        facts = {"worker_id": number, "model_name": "m", "endpoint": f"http://127.0.0.1:{number}"}
        facts |= {"block_size": BLOCK_TOKENS, "total_kv_blocks": 1000}
        facts |= {"kv_events_endpoints": worker.endpoint, "replay_endpoint": worker.replay_endpoint}
        self._ask("worker", facts)

    def scores(self, prompt: Sequence[int]) -> dict[int, tuple[int, int, int]]:
        """Leading blocks of each worker: on the device, then on the host, then on disk."""
        return {int(number): tuple(blocks) for number, blocks in self._ask("scores", list(prompt)).items()}

    def _ask(self, what: str, value: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, value]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise AssertionError("the router has ended")


@contextmanager
def selection(followed: Sequence[Worker]) -> Iterator[Selection]:
    """A router that follows workers, numbered from 0."""
    command = [sys.executable, "-m", "tests.routers.selection"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        router = Selection(process)
        for number, worker in enumerate(followed):
            router.add(number, worker)
        yield router
        assert process.stdin is not None
        process.stdin.close()
        process.kill()


class _Stub(BaseHTTPRequestHandler):
    """An engine's HTTP server, as far as a router needs one that has chosen it."""

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Healthy."""
        self._answer({"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self) -> None:
        """A completion."""
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"index": 0, "text": "", "finish_reason": "stop"}
        self._answer({"id": "x", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]})

    def _answer(self, what: Mapping[str, Any]) -> None:
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class VllmRouter:
    """vLLM's router, asked over HTTP; what it credits is in its log."""

    def __init__(self, url: str, log: Path, urls: Sequence[str]) -> None:
        self._url, self._urls = url, urls
        self._log = log.open(encoding="utf-8")
        self._said = ""

    def choose(self, prompt: Sequence[int]) -> tuple[int, int]:
        """The worker that a prompt is sent to, and the tokens that the router need not have it compute."""
        body = json.dumps({"model": "m", "prompt": list(prompt), "max_tokens": 1}).encode()
        request = urllib.request.Request(self._url + "/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            answer.read()
        wait_until(self._has_decided, "the router has logged its choice")
        found = DECISION.search(self._said)
        assert found is not None
        self._said = self._said[found.end() :]
        return self._urls.index(found[1]), int(found[2])

    def _has_decided(self) -> bool:
        self._said += re.sub(r"\x1b\[[0-9;]*m", "", self._log.read())
        return DECISION.search(self._said) is not None

    def close(self) -> None:
        """Stop reading."""
        self._log.close()


@contextmanager
def running_router(command: Sequence[str], port: int, log: Path) -> Iterator[None]:
    """A router that serves at a port of loopback."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=out, stderr=subprocess.STDOUT)

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text(encoding="utf-8")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=WAIT_S):
                return True
        except OSError:
            return False

    try:
        wait_until(is_ready, "the router serves")
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def vllm_router(followed: Sequence[Worker]) -> Iterator[VllmRouter]:
    """A router that follows workers."""
    with ExitStack() as stack:
        folder = stack.enter_context(short_folder())
        urls = []
        for _ in followed:
            stub = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), _Stub))
            threading.Thread(target=stub.serve_forever, daemon=True).start()
            stack.callback(stub.shutdown)
            urls.append(f"http://127.0.0.1:{stub.server_port}")
        port, metrics_port = free_ports(2)
        command = [sys.executable, "-m", "vllm_router.launch_router", "--policy", "kv_aware", "--log-level", "debug"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
        command += ["--kv-event-block-size", str(BLOCK_TOKENS), "--kv-event-model", "m", "--worker-urls", *urls]
        command += ["--kv-penalty-host", str(HOST_CREDIT), "--kv-penalty-disk", str(DISK_CREDIT)]
        for url, worker in zip(urls, followed, strict=True):
            command += ["--kv-event-source", f"{url}={worker.endpoint}"]
        log = Path(folder) / "log"
        stack.enter_context(running_router(command, port, log))
        router = VllmRouter(f"http://127.0.0.1:{port}", log, urls)
        stack.callback(router.close)
        yield router


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
