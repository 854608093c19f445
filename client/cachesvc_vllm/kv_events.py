"""KV events for routers, from vLLM's own publisher: the daemon's changes, with the tokens that this engine has hashed.

vLLM collects a connector's events at the end of a step. An engine that is idle has none, while others of its node go on
changing what it can hit. So nothing is collected: a thread follows the daemon and publishes at once.

    scheduler thread:  note(request)  ->  KnownTokens
    announcing thread: Subscribe      ->  KvEventMapper  ->  vLLM's publisher
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from cachesvc_client import EventSubscriber
from cachesvc_client.adapters.kv_events import Adapter, Event, KnownTokens, KvEventBridge, KvEventMapper
from cachesvc_client.plugins.node import Node
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisher,
    EventPublisherFactory,
    KVEventBatch,
)
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys

from cachesvc_vllm.vllm_objects import Request

KNOWN_BLOCKS = 262_144
"""Blocks whose tokens are kept, some 80 MB at 16 tokens a block. Older ones are announced no more after a loss."""

KINDS: dict[str, Callable[..., Any]] = {
    "AllBlocksCleared": AllBlocksCleared,
    "BlockRemoved": BlockRemoved,
    "BlockStored": BlockStored,
}

log = logging.getLogger(__name__)


class PublisherTap:
    """Gets hold of vLLM's publisher, which vLLM makes right after its connector, by the factory's public names.

    ``publisher``: None until vLLM has made it.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self._kind = config.publisher
        self.publisher: EventPublisher | None = None
        name = f"cachesvc-{secrets.token_hex(8)}"
        EventPublisherFactory.register_publisher(name, self._make)
        config.publisher = name

    def _make(self, data_parallel_rank: int = 0, **_: Any) -> EventPublisher:
        """Make the publisher that the operator asked for."""
        self._config.publisher = self._kind
        self.publisher = EventPublisherFactory.create(self._config, data_parallel_rank)
        return self.publisher


def tap_publisher(vllm_config: Any) -> PublisherTap | None:
    """A tap where vLLM is to publish KV events; else None, and nothing costs anything."""
    config = vllm_config.kv_events_config
    if config is None or not config.enable_kv_cache_events or config.publisher == "null":
        return None
    return PublisherTap(config)


class Announcer:
    """Publishes what this engine can hit. ``keys``: the daemon's keys of vLLM's hashes and a request's salt.

    ``note``, ``drop`` and ``reset`` are called on vLLM's scheduler thread and do not wait.
    """

    def __init__(
        self,
        node: Node,
        token_file: str | None,
        publisher: EventPublisher,
        keys: Callable[[Sequence[bytes], bytes], bytes],
    ) -> None:
        self._node = node
        self._token_file = token_file
        self._publisher = publisher
        self._keys = keys
        self._block_tokens = node.share.layout.block_tokens
        self._tokens = KnownTokens(KNOWN_BLOCKS)
        self._noted: dict[str, tuple[int, bytes]] = {}
        self._mapper = KvEventMapper(node.share.layout, tokens=self._tokens, hash_of=maybe_convert_block_hash)
        self._bridge = KvEventBridge(self._connect, self._mapper, self._publish)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="cachesvc-vllm-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def note(self, request: Request, hashes: Sequence[bytes], salt: bytes) -> None:
        """Remember the tokens of a request's blocks that were hashed since the last call."""
        noted, noted_salt = self._noted.get(request.request_id, (0, salt))
        first = noted if noted_salt == salt else 0
        count = len(hashes)
        if count <= first:
            return
        self._noted[request.request_id] = count, salt
        lora = request.lora_request
        self._tokens.learn(
            self._keys(hashes[first:count], salt),
            request.all_token_ids[first * self._block_tokens : count * self._block_tokens],
            self._block_tokens,
            adapter=Adapter() if lora is None else Adapter(lora.adapter_id, lora.name),
            extra_keys=self._extra_keys(request, first, count),
        )

    def drop(self, request_id: str) -> None:
        """Forget an ended request. Its blocks may stay cached."""
        self._noted.pop(request_id, None)

    def reset(self) -> None:
        """Drop all older events: this engine can hit none of their blocks any more."""
        self._noted.clear()
        self._tokens.forget()

    def restart(self) -> None:
        """The engine is on another lease, perhaps on another replica."""
        self._bridge.restart()

    def close(self) -> None:
        self._is_closed = True
        self._bridge.close()
        if self._thread.is_alive():
            self._thread.join()

    def _extra_keys(self, request: Request, first: int, end: int) -> Callable[[], Sequence[object]] | None:
        """Makes what vLLM's events say of blocks beside tokens, for requests that have such."""
        if not (request.mm_features or request.lora_request or request.cache_salt or request.prompt_embeds is not None):
            return None

        def make() -> Sequence[object]:
            found, image = [], 0
            for block in range(first, end):
                start = block * self._block_tokens
                keys, image = generate_block_hash_extra_keys(request, start, start + self._block_tokens, image)
                found.append(keys)
            extra_keys: Sequence[object] = to_event_extra_keys(found)
            return extra_keys

        return make

    def _connect(self) -> EventSubscriber:
        registration = self._node.lease.registration
        self._mapper.replica = registration.replica
        return EventSubscriber(
            self._node.socket_path, registration.namespace, token_file=self._token_file, storage=True
        )

    def _publish(self, events: Sequence[Event]) -> None:
        self._publisher.publish(KVEventBatch(ts=time.time(), events=[as_vllm(event) for event in events]))

    def _run(self) -> None:
        try:
            self._bridge.run()
        except Exception:
            if not self._is_closed:  # vLLM closes its publisher before its connector
                log.exception("kv_events_stopped")


def as_vllm(event: Event) -> Any:
    """An event as vLLM's publisher takes it."""
    return KINDS[event["type"]](**{name: value for name, value in event.items() if name != "type"})
