"""The mapping to routers' KV events, held to the schema that vLLM publishes and to what Dynamo and llm-d read.

Field tables written down from, as of 2026-08:
vLLM    github.com/vllm-project/vllm  vllm/distributed/kv_events.py  (0181ea3; events as arrays until its PR 42892)
llm-d   github.com/llm-d/llm-d-router pkg/kvevents/engineadapter/vllm_adapter.go, pkg/kvevents/pool.go,
        pkg/kvevents/zmq_subscriber.go (ebab687): batches as arrays, events as maps or arrays, replay with topics
Dynamo  github.com/ai-dynamo/dynamo   lib/kv-router/src/zmq_wire/{types,deserialize,convert}.rs (2bd0a36, 0917ca2):
        batches as arrays, events as maps or arrays, hashes as 64-bit numbers alone
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any, Union

import msgspec
import pytest
import zmq
from cachesvc_client import KEY_BYTES, EventsMissed, InvalidRequest, Layout, Plane, PlaneGroup, block_keys, opaque
from cachesvc_client.adapters.kv_events import (
    FIELDS,
    Form,
    KnownTokens,
    KvEventBridge,
    KvEventMapper,
    hash_of,
    wire_batch,
)
from cachesvc_client.adapters.zmq_events import END, ZmqPublisher
from cachesvc_client.events import Batch, CopyLocation, Kind, Part, Run

BLOCK_TOKENS = 4
LAYOUT = opaque(block_bytes=64, block_tokens=BLOCK_TOKENS, layers=1)
WINDOWED = Layout(
    BLOCK_TOKENS,
    1,
    (PlaneGroup("full"), PlaneGroup("window", 8)),
    (Plane("k", 0, "full", (8,), "uint8"), Plane("k", 1, "window", (8,), "uint8")),
)
GPU, HOST = CopyLocation(0, "device", 0), CopyLocation(0, "host", 0)
WAIT_MS = 30_000

# name: (type, is it always there)
SCHEMA: dict[str, dict[str, tuple[Any, bool]]] = {
    "BlockStored": {
        "block_hashes": (list[int], True),
        "parent_block_hash": (int | None, True),
        "token_ids": (list[int], True),
        "block_size": (int, True),
        "lora_id": (int | None, True),
        "medium": (str | None, True),
        "lora_name": (str | None, True),
        "extra_keys": (list[tuple[Any, ...] | None] | None, False),
        "group_idx": (int | None, False),
        "kv_cache_spec_kind": (str | None, False),
        "kv_cache_spec_sliding_window": (int | None, False),
    },
    "BlockRemoved": {
        "block_hashes": (list[int], True),
        "medium": (str | None, True),
        "group_idx": (int | None, False),
    },
    "AllBlocksCleared": {},
}
DYNAMO_TIERS = {"GPU": "device", "DEVICE": "device", "CPU": "host", "CPU_PINNED": "host", "DISK": "storage"}
DYNAMO_KINDS = {"full_attention", "sliding_window"}


def has_ipv6_loopback() -> bool:
    """True where a socket can be bound to ::1."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def structs(*, array_like: bool) -> Any:
    """Decoders as vLLM's subscribers make them, for a batch of typed events."""
    events: list[Any] = []
    for name, fields in SCHEMA.items():
        required: list[Any] = [(field, kind) for field, (kind, always) in fields.items() if always]
        optional: list[Any] = [(field, kind, None) for field, (kind, always) in fields.items() if not always]
        events.append(
            msgspec.defstruct(
                name, [*required, *optional], tag=True, array_like=array_like, forbid_unknown_fields=not array_like
            )
        )
    many: Any = list[Union[tuple(events)]]  # type: ignore[misc]  # noqa: UP007 - made at run time
    batch: list[Any] = [("ts", float), ("events", many), ("data_parallel_rank", int | None, None)]
    return msgspec.defstruct("KVEventBatch", batch, array_like=True)


DECODERS = {form: msgspec.msgpack.Decoder(structs(array_like=form is Form.ARRAY)) for form in Form}


def decode(events: list[dict[str, Any]], form: Form = Form.MAP) -> list[Any]:
    """Encode as the publisher does and decode against the schema."""
    batch = DECODERS[form].decode(msgspec.msgpack.encode(wire_batch(events, 12.5, 0, form)))
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 0)
    return list(batch.events)


def split(packed: bytes) -> tuple[bytes, ...]:
    return tuple(packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES))


TOKENS = list(range(100, 124))
KEYS = split(block_keys(bytes(KEY_BYTES), TOKENS, BLOCK_TOKENS))


def stored(location: CopyLocation, keys: tuple[bytes, ...], parent: bytes = b"", kind: Kind = Kind.STORED) -> Run:
    return Run(kind, True, location, parent, keys, "published")


def removed(location: CopyLocation, keys: tuple[bytes, ...], kind: Kind = Kind.REMOVED) -> Run:
    return Run(kind, False, location, b"", keys, "evicted")


class Feeder:
    """Numbers runs as a daemon does."""

    def __init__(self) -> None:
        self.last = 0

    def changes(self, *runs: Run) -> Batch:
        first = self.last + 1
        self.last += sum(len(run.keys) for run in runs)
        return Batch(1, 1, Part.NONE, first, self.last, runs)

    def snapshot(self, *runs: Run) -> list[Batch]:
        return [Batch(1, 1, Part.FIRST, 0, self.last, runs), Batch(1, 1, Part.LAST, 0, self.last, ())]


def knowing(blocks: int = len(KEYS)) -> KnownTokens:
    tokens = KnownTokens()
    tokens.learn(b"".join(KEYS[:blocks]), TOKENS, BLOCK_TOKENS)
    return tokens


@pytest.mark.parametrize("form", list(Form))
def test_every_event_decodes_against_the_published_schema(form: Form) -> None:
    feeder = Feeder()
    mapper = KvEventMapper(WINDOWED, tokens=knowing(), lora_name="adapter")
    window = CopyLocation(1, "device", 0)
    events = mapper.events_of(
        feeder.changes(stored(GPU, KEYS[:3]), stored(window, KEYS[:3]), stored(HOST, KEYS[:1]))
    ) + mapper.events_of(feeder.changes(removed(window, KEYS[:1])))
    full, windowed, host, gone = decode(events, form)
    assert full.block_hashes == [int.from_bytes(key[24:], "big") for key in KEYS[:3]]
    assert (full.parent_block_hash, full.token_ids, full.block_size) == (None, TOKENS[:12], BLOCK_TOKENS)
    assert (full.medium, full.lora_name, full.group_idx) == ("GPU", "adapter", 0)
    assert (full.kv_cache_spec_kind, full.kv_cache_spec_sliding_window) == ("full_attention", None)
    assert (windowed.group_idx, windowed.kv_cache_spec_kind) == (1, "sliding_window")
    assert windowed.kv_cache_spec_sliding_window == 8
    assert {event.kv_cache_spec_kind for event in (full, windowed)} <= DYNAMO_KINDS
    assert (host.medium, host.token_ids) == ("CPU", TOKENS[:4])
    assert (gone.block_hashes, gone.medium, gone.group_idx) == ([hash_of(KEYS[0])], "GPU", 1)
    (cleared,) = decode([{"type": "AllBlocksCleared"}], form)
    assert type(cleared).__name__ == "AllBlocksCleared"


def test_the_order_of_array_fields_is_that_of_the_schema() -> None:
    assert {name: tuple(fields) for name, fields in SCHEMA.items()} == FIELDS


def test_readers_of_dynamo_and_llm_d_can_use_what_is_told() -> None:
    mapper = KvEventMapper(LAYOUT, tokens=knowing())
    feeder = Feeder()
    mapper.events_of(feeder.changes(stored(GPU, KEYS[:1])))
    (event,) = mapper.events_of(feeder.changes(stored(GPU, KEYS[1:3], KEYS[0])))
    assert DYNAMO_TIERS[event["medium"]] == "device"
    assert DYNAMO_TIERS[KvEventMapper(LAYOUT).media["host"]] == "host"
    assert DYNAMO_TIERS[KvEventMapper(LAYOUT).media["storage"]] == "storage"
    assert all(0 <= number < 1 << 64 for number in [*event["block_hashes"], event["parent_block_hash"]])
    assert len(event["token_ids"]) == len(event["block_hashes"]) * event["block_size"], "llm-d skips a ragged event"
    assert len({*event["block_hashes"], event["parent_block_hash"]}) == 3, "Dynamo drops an event that repeats a hash"


def test_a_worker_sees_its_own_replica_and_the_host() -> None:
    other = CopyLocation(0, "device", 1)
    batch = Feeder().changes(stored(GPU, KEYS[:1]), stored(other, KEYS[:1]), stored(HOST, KEYS[:1]))
    assert [e["medium"] for e in KvEventMapper(LAYOUT, replica=1).events_of(batch)] == ["GPU", "CPU"]
    assert KvEventMapper(LAYOUT, replica=1).events_of(Feeder().changes(stored(GPU, KEYS[:1]))) == []


def test_a_copy_that_failed_is_not_told() -> None:
    failed = Run(Kind.COPY_FAILED, False, GPU, b"", KEYS[:1], "copy_failed")
    assert KvEventMapper(LAYOUT).events_of(Feeder().changes(failed)) == []


def test_a_snapshot_is_told_whole_and_root_first() -> None:
    feeder = Feeder()
    mapper = KvEventMapper(LAYOUT, tokens=knowing())
    first, last = feeder.snapshot(
        stored(GPU, KEYS[3:5], KEYS[2]), stored(GPU, KEYS[:3]), stored(HOST, KEYS[1:2], KEYS[0])
    )
    assert mapper.events_of(first) == []
    events = mapper.events_of(last)
    assert [e["type"] for e in events] == ["AllBlocksCleared", "BlockStored", "BlockStored"]
    assert events[1]["block_hashes"] == [hash_of(key) for key in KEYS[:5]]
    assert (events[2]["medium"], events[2]["parent_block_hash"]) == ("CPU", hash_of(KEYS[0]))


def test_a_gap_is_never_passed_on() -> None:
    mapper = KvEventMapper(LAYOUT)
    mapper.events_of(Batch(1, 1, Part.NONE, 1, 1, (stored(GPU, KEYS[:1]),)))
    with pytest.raises(EventsMissed):
        mapper.events_of(Batch(1, 1, Part.NONE, 3, 3, (stored(GPU, KEYS[1:2], KEYS[0]),)))


@pytest.fixture
def context() -> Iterator[Any]:
    with zmq.Context() as made:
        yield made


def test_published_batches_arrive_and_are_replayed(context: Any) -> None:
    mapper, feeder = KvEventMapper(LAYOUT, tokens=knowing()), Feeder()
    with (
        ZmqPublisher(
            "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic="kv@pod@model", rank=3, replay_batches=2
        ) as publisher,
        context.socket(zmq.SUB) as listener,
        context.socket(zmq.DEALER) as asker,
    ):
        listener.subscribe(b"kv@")
        listener.rcvtimeo = asker.rcvtimeo = WAIT_MS
        listener.connect(publisher.endpoint)
        while not listener.poll(20):  # a subscription takes a while to reach the publisher
            publisher.publish([{"type": "AllBlocksCleared"}])
        topic, number, payload = listener.recv_multipart()
        assert topic == b"kv@pod@model"
        publisher.publish(mapper.events_of(feeder.changes(stored(GPU, KEYS[:2]))))
        while not (events := DECODERS[Form.MAP].decode(payload).events) or not hasattr(events[0], "token_ids"):
            before = int.from_bytes(number, "big")
            topic, number, payload = listener.recv_multipart()
            assert int.from_bytes(number, "big") == before + 1
        batch = DECODERS[Form.MAP].decode(payload)
        assert batch.data_parallel_rank == 3
        assert batch.events[0].token_ids == TOKENS[:8]
        asker.connect(publisher.replay_endpoint)
        asker.send_multipart((b"", b"short"))
        asker.send_multipart((b"", (0).to_bytes(8, "big")))
        last = int.from_bytes(number, "big")
        for expected in (last - 1, last):
            assert asker.recv_multipart()[:3] == [b"", b"kv@pod@model", expected.to_bytes(8, "big")]
        assert asker.recv_multipart() == [b"", b"", END, b""]


@pytest.mark.parametrize("endpoint", ["tcp://[::1]:*", "tcp://[::]:*", "tcp://*:*"])
@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6 loopback")
def test_events_and_replays_are_reached_over_ipv6(context: Any, endpoint: str) -> None:
    with (
        ZmqPublisher(endpoint, endpoint) as publisher,
        context.socket(zmq.SUB) as listener,
        context.socket(zmq.DEALER) as asker,
    ):
        listener.ipv6 = asker.ipv6 = True
        listener.subscribe(b"")
        listener.connect(f"tcp://[::1]:{publisher.endpoint.rpartition(':')[2]}")
        while not listener.poll(20):
            publisher.publish([{"type": "AllBlocksCleared"}])
        asker.rcvtimeo = WAIT_MS
        asker.connect(f"tcp://[::1]:{publisher.replay_endpoint.rpartition(':')[2]}")
        asker.send_multipart((b"", (0).to_bytes(8, "big")))
        assert asker.recv_multipart()[2] == (0).to_bytes(8, "big")


def test_every_address_is_reached_over_ipv4_too(context: Any) -> None:
    with ZmqPublisher("tcp://*:*") as publisher, context.socket(zmq.SUB) as listener:
        listener.subscribe(b"")
        listener.connect(f"tcp://127.0.0.1:{publisher.endpoint.rpartition(':')[2]}")
        while not listener.poll(20):
            publisher.publish([{"type": "AllBlocksCleared"}])


def test_an_endpoint_in_use_is_named() -> None:
    with (
        ZmqPublisher("tcp://127.0.0.1:*") as first,
        pytest.raises(InvalidRequest, match="cannot bind tcp"),
        ZmqPublisher(first.endpoint),
    ):
        raise AssertionError("two publishers on one endpoint")


def test_a_closed_bridge_does_not_begin() -> None:
    def connect() -> Any:
        raise AssertionError("it was closed")

    told: list[Any] = []
    bridge = KvEventBridge(connect, KvEventMapper(LAYOUT), told.append)
    bridge.close()
    bridge.run()
    assert told == []
