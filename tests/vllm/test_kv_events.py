"""KV events of vLLM's own publisher: routers that look prompts up by tokens find what a match finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import zmq

from tests.e2e.rig import Node, running_node, short_folder
from tests.vllm.harness import daemon_faults, run_module
from tests.vllm.rig import Engine, Fleet, engines, random_prompt


def run(node: Node, seed: int, *, resets: float = 0, deaths: int = 0) -> dict[str, int]:
    """Return the counts of a run. The daemon dies and comes back when the run asks for it."""
    faults = daemon_faults(node.daemon.kill, node.daemon.start)
    with short_folder() as folder:
        arguments = (node.socket, str(seed), str(folder), str(resets), str(deaths))
        return run_module("tests.vllm.event_runs", *arguments, faults=faults)


def test_an_index_of_vllms_events_is_what_a_match_finds() -> None:
    with running_node() as node:
        told = run(node, 1)
        assert told["requests"] == 600
        assert min(told["device"], told["host"], told["events"]) > 50


def test_after_new_weights_nothing_older_is_announced() -> None:
    with running_node() as node:
        assert run(node, 2, resets=0.01)["requests"] == 600


def test_an_index_is_right_again_after_the_daemon_died() -> None:
    with short_folder() as folder, running_node(folder=folder) as node:
        assert run(node, 3, deaths=2)["host"] > 50


WAIT_MS = 120_000


class Listener:
    """Blocks that an engine has announced on its device: by hash what vLLM says of each."""

    def __init__(self, context: Any, endpoint: str) -> None:
        self._socket = context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.reconnect_ivl = 1
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(endpoint)
        self._socket.rcvtimeo = WAIT_MS
        self.blocks: dict[int, Any] = {}

    def wait_connected(self) -> None:
        """Wait for the publisher: what it sends before is lost."""
        assert self._monitor.poll(WAIT_MS), "no publisher"
        self._socket.disable_monitor()

    def take_until(self, count: int) -> dict[int, Any]:
        """Listen until the given number is announced."""
        while len(self.blocks) < count:
            for event in msgspec.msgpack.decode(self._socket.recv_multipart()[2])[1]:
                if event["type"] == "BlockStored" and event["medium"] == "GPU":
                    self._take(event)
        return self.blocks

    def close(self) -> None:
        """Stop listening."""
        self._socket.close(0)

    def _take(self, event: dict[str, Any]) -> None:
        size, parent = event["block_size"], event["parent_block_hash"]
        facts = {name: event[name] for name in ("lora_id", "lora_name", "group_idx", "kv_cache_spec_kind")}
        for at, each in enumerate(event["block_hashes"]):
            tokens = event["token_ids"][at * size : (at + 1) * size]
            extra = None if event.get("extra_keys") is None else event["extra_keys"][at]
            self.blocks[each] = {**facts, "parent": parent, "tokens": tokens, "extra": extra}
            parent = each


def test_engines_announce_what_vllm_alone_would_while_they_are_idle(fleet: Fleet) -> None:
    prompt = random_prompt(300, 6.5)
    asked = [prompt, replace(prompt, salt="a"), random_prompt(301, 3.2)]
    blocks = 6 + 6 + 3

    def start(name: str, socket: str | None) -> Engine:
        return fleet.engine(socket, is_split=socket is not None, events=f"ipc://{folder}/{name}")

    with running_node() as node, short_folder() as folder, zmq.Context() as context:
        heard = {name: Listener(context, f"ipc://{folder}/{name}") for name in ("alone", "first", "second")}
        with engines(start("alone", None)) as (alone,):
            heard["alone"].wait_connected()
            for each in asked:
                alone.ask(each)
            expected = heard["alone"].take_until(blocks)
        with engines(start("first", node.socket), start("second", node.socket)) as (first, second):
            for name in ("first", "second"):
                heard[name].wait_connected()
            for each in asked:
                first.ask(each)
            assert heard["first"].take_until(blocks) == expected
            second.ask(replace(prompt, new=1))
            assert heard["second"].take_until(6) == {
                key: block for key, block in expected.items() if key in heard["second"].blocks
            }, "what the first one computed, too, once it had it in a request"
        for listener in heard.values():
            listener.close()
