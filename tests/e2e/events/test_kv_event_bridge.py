"""A bridge outlives what can be mended: a token that was replaced, tokens of prompts that become known late."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cachesvc_client import CacheClient, EventSubscriber, InvalidRequest, Lease, block_keys
from cachesvc_client.adapters.kv_events import CLEARED, Event, KnownTokens, KvEventBridge, KvEventMapper, hash_of

from tests.e2e.access.test_access import ENGINE, FRESH, entry, guarded, write_tokens
from tests.e2e.engine import BLOCK_TOKENS, PLAIN, prompt
from tests.e2e.rig import Node, short_folder

WAIT_S = 30.0


class Index:
    """Hashes on the device, as a router has them. ``connections``: how often the bridge has subscribed."""

    def __init__(self) -> None:
        self.hashes: set[int] = set()
        self.cleared = self.connections = 0
        self._batches: queue.Queue[list[Event]] = queue.Queue()
        self.connected = threading.Semaphore(0)

    def publish(self, events: list[Event]) -> None:
        self._batches.put(list(events))

    def take_until(self, holds: Callable[[], bool]) -> None:
        """Apply batches as they come, until it does."""
        while not holds():
            for event in self._batches.get(timeout=WAIT_S):
                if event["type"] == "BlockStored":
                    self.hashes |= set(event["block_hashes"])
                elif event["type"] == "BlockRemoved":
                    self.hashes -= set(event["block_hashes"])
                else:
                    self.hashes.clear()
                    self.cleared += 1


@contextmanager
def bridging(index: Index, connect: Callable[[], EventSubscriber], mapper: KvEventMapper) -> Iterator[threading.Thread]:
    """A bridge on a thread of its own, which must not end by itself."""

    def count() -> EventSubscriber:
        index.connected.release()
        return connect()

    bridge = KvEventBridge(
        count, mapper, lambda events: index.publish(list(events)), pause_s=0.01, longest_pause_s=0.05
    )
    thread = threading.Thread(target=bridge.run)
    thread.start()
    try:
        yield thread
        assert thread.is_alive()
    finally:
        bridge.close()
        thread.join()


def serve(lease: Lease, seed: int) -> int:
    """Publish a block without computing it; its hash."""
    keys = block_keys(lease.registration.namespace, prompt(seed, 1), BLOCK_TOKENS)
    with lease.match(keys) as sequence:
        sequence.allocate(1)
        sequence.publish(1, keys)
    return hash_of(keys)


def test_a_bridge_waits_for_a_token_that_was_replaced() -> None:
    with short_folder() as folder:
        mine = Path(folder) / "mine"
        mine.write_text(ENGINE)

        def text(token: str) -> str:
            return entry(token, "engines", '["engine"]', 'tenant = "team-a"')

        with (
            guarded(folder, text(ENGINE)) as daemon,
            CacheClient(daemon.socket, token_file=str(mine)) as client,
        ):
            registration = client.register("m", PLAIN, device_pages=[8], host_pages=[0])
            first = serve(client.open_lease(registration), 1)
            index = Index()
            with bridging(
                index,
                lambda: EventSubscriber(daemon.socket, registration.namespace, token_file=str(mine)),
                KvEventMapper(PLAIN),
            ):
                index.take_until(lambda: index.hashes == {first})
                cleared = index.cleared
                write_tokens(Path(folder) / "tokens.toml", text(FRESH))
                daemon.process.send_signal(signal.SIGHUP)
                index.take_until(lambda: index.cleared > cleared)
                assert index.hashes == set(), "a router must not trust an index that is not followed"
                for _ in range(4):
                    assert index.connected.acquire(timeout=WAIT_S), "it tries again and again"
                mine.write_text("")
                for _ in range(2):
                    assert index.connected.acquire(timeout=WAIT_S), "a file that is being written is no reason to end"
                mine.write_text(FRESH)
                index.take_until(lambda: index.hashes == {first})
                second = serve(client.open_lease(registration), 2)
                index.take_until(lambda: index.hashes == {first, second})


def test_tokens_that_become_known_late_need_no_change_in_the_daemon(node: Node) -> None:
    with CacheClient(node.socket) as client:
        registration = client.register("m", PLAIN, device_pages=[8], host_pages=[0])
        mine = serve(client.open_lease(registration), 1)
        index, tokens = Index(), KnownTokens()
        mapper = KvEventMapper(PLAIN, tokens=tokens)
        with bridging(index, lambda: EventSubscriber(node.socket, registration.namespace), mapper):
            index.take_until(lambda: index.cleared > 0)
            assert index.hashes == set()
            tokens.learn(block_keys(registration.namespace, prompt(1, 1), BLOCK_TOKENS), prompt(1, 1), BLOCK_TOKENS)
            index.take_until(lambda: index.hashes == {mine})
            tokens.forget()
            index.take_until(lambda: not index.hashes)


def test_what_waiting_cannot_cure_ends_it_and_clears_routers(node: Node) -> None:
    published: list[Event] = []
    bridge = KvEventBridge(lambda: EventSubscriber(node.socket, b"short"), KvEventMapper(PLAIN), published.extend)
    with pytest.raises(InvalidRequest):
        bridge.run()
    assert published == [CLEARED]
