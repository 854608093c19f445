"""Subscribers of a real daemon: a snapshot and every change, none of another tenant's, and no harm from the slow."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cachesvc_client import (
    BlockMirror,
    DaemonUnavailable,
    EventsMissed,
    EventSubscriber,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    NotOwned,
    SubscriberTooSlow,
)
from cachesvc_client.aio import AsyncEventSubscriber
from cachesvc_client.core.errors import error_of
from cachesvc_client.events import Batch, CopyLocation, Kind, Part
from grpc import RpcError
from kvcache.v1 import admin_pb2, event_pb2, event_pb2_grpc

from tests.e2e.engine import LAYOUTS, Engine, prompt
from tests.e2e.rig import Node, running_node, wait_until

PLACES = {"host": CopyLocation(0, "host", 0), "replica 0": CopyLocation(0, "device", 0)}


def admin_truth(node: Node, model: int, groups: tuple[str, ...] = ("full",)) -> dict[bytes, set[CopyLocation]]:
    """Copies of every block of a model, as AdminService lists them."""
    out: dict[bytes, set[CopyLocation]] = {}
    for block in node.admin.ListBlocks(admin_pb2.ListBlocksRequest(model_id=model, limit=4096)).blocks:
        locations = {
            PLACES[copy.place]._replace(group=groups.index(copy.group))
            for copy in block.copies
            if copy.state in ("READY", "DRAINING")
        }
        if locations:
            out[block.key] = locations
    return out


def group_names(engine: Engine) -> tuple[str, ...]:
    return tuple(group.name for group in engine.layout.groups)


def catch_up(subscriber: EventSubscriber, batches: Iterator[Batch], mirror: BlockMirror) -> None:
    """Apply batches until the mirror is whole and has what has happened by now."""
    now = next(subscriber.subscribe(snapshot=False))
    while not mirror.is_whole or mirror.epoch != now.epoch or mirror.last < now.last:
        mirror.apply(next(batches))


@pytest.mark.parametrize("layout", ["plain", "windowed"])
def test_a_mirror_shows_what_the_daemon_has(node: Node, layout: str) -> None:
    with Engine(node.socket, device_pages=16, host_pages=16, layout=LAYOUTS[layout]) as engine:
        engine.serve(prompt(1, 6))
        with EventSubscriber(node.socket, engine.registration.namespace) as subscriber:
            mirror, batches = BlockMirror(), subscriber.follow()
            catch_up(subscriber, batches, mirror)
            assert mirror.locations == admin_truth(node, 1, group_names(engine))
            for seed in range(2, 12):
                engine.serve(prompt(seed, 6))
            wait_until(lambda: node.pages("in_flight") == 0, "stores have ended")
            catch_up(subscriber, batches, mirror)
            assert mirror.locations == admin_truth(node, 1, group_names(engine))
            assert {each.tier for found in mirror.locations.values() for each in found} == {
                "device",
                "host",
            }
            keys = mirror.root_first()
            assert sorted(keys) == sorted(mirror.locations)
            assert all(not mirror.parents[key] or mirror.parents[key] in keys[:at] for at, key in enumerate(keys))
            evicted = node.admin.Evict(admin_pb2.EvictRequest(model_id=1, tier="device")).evicted
            assert evicted
            catch_up(subscriber, batches, mirror)
            assert mirror.locations == admin_truth(node, 1, group_names(engine))


def test_two_tenants_with_the_same_prompts_share_no_event(node: Node) -> None:
    settings: dict[str, Any] = {"device_pages": 16, "host_pages": 0}
    with (
        Engine(node.socket, name="a", salt=b"tenant a", **settings) as first,
        Engine(node.socket, name="b", salt=b"tenant b", **settings) as second,
        EventSubscriber(node.socket, first.registration.namespace) as of_first,
        EventSubscriber(node.socket, second.registration.namespace) as of_second,
    ):
        streams = [(of_first, of_first.follow(), BlockMirror()), (of_second, of_second.follow(), BlockMirror())]
        for subscriber, batches, mirror in streams:
            catch_up(subscriber, batches, mirror)
        first.serve(prompt(1, 5))
        for subscriber, batches, mirror in streams:
            catch_up(subscriber, batches, mirror)
        assert len(streams[0][2].locations) == 5
        assert streams[1][2].locations == {}
        assert streams[1][2].last == 0, "not even the number of another tenant's changes shows"
        second.serve(prompt(1, 5))
        for subscriber, batches, mirror in streams:
            catch_up(subscriber, batches, mirror)
        mine, other = set(streams[0][2].locations), set(streams[1][2].locations)
        assert len(mine) == len(other) == 5
        assert not mine & other


def test_who_does_not_know_the_namespace_is_told_nothing(node: Node) -> None:
    with Engine(node.socket, salt=b"secret") as engine:
        engine.serve(prompt(1, 2))
        stub = event_pb2_grpc.EventServiceStub(node.channel)
        with pytest.raises(RpcError) as refused:
            list(stub.Subscribe(event_pb2.SubscribeRequest(model_id=1, snapshot=True)))
        assert isinstance(error_of(refused.value), NotOwned)
        other = event_pb2.SubscribeRequest(namespace=bytes(32), snapshot=True)
        with pytest.raises(RpcError) as refused:
            list(stub.Subscribe(other))
        assert isinstance(error_of(refused.value), NotFound)
        for bad in (
            event_pb2.SubscribeRequest(namespace=b"short"),
            event_pb2.SubscribeRequest(namespace=engine.registration.namespace, model_id=7),
            event_pb2.SubscribeRequest(
                namespace=engine.registration.namespace, epoch=engine.client.epoch, after_sequence_number=999
            ),
        ):
            with pytest.raises(RpcError) as refused:
                list(stub.Subscribe(bad))
            assert isinstance(error_of(refused.value), InvalidRequest), refused.value


def test_a_subscriber_goes_on_where_it_was(node: Node) -> None:
    with Engine(node.socket, device_pages=16, host_pages=0) as engine:
        namespace, epoch = engine.registration.namespace, engine.client.epoch
        mirror = BlockMirror()
        with EventSubscriber(node.socket, namespace) as subscriber:
            engine.serve(prompt(1, 3))
            catch_up(subscriber, subscriber.follow(), mirror)
        engine.serve(prompt(2, 3))
        with EventSubscriber(node.socket, namespace) as subscriber:
            batches = subscriber.subscribe(snapshot=False, epoch=epoch, after=mirror.last)
            catch_up(subscriber, batches, mirror)
            assert mirror.locations == admin_truth(node, 1)
            with pytest.raises(EventsMissed, match="epoch"):
                next(subscriber.subscribe(snapshot=False, epoch=epoch + 1, after=0))


def test_what_is_forgotten_is_a_gap_by_name() -> None:
    with running_node(["--event-history", "8"]) as node, Engine(node.socket, host_pages=0) as engine:
        engine.serve(prompt(1, 12))
        with EventSubscriber(node.socket, engine.registration.namespace) as subscriber:
            batches = subscriber.subscribe(snapshot=False, epoch=engine.client.epoch, after=3)
            with pytest.raises(EventsMissed, match="oldest that is has number 5"):
                next(batches)
            assert next(subscriber.subscribe(snapshot=False, epoch=engine.client.epoch, after=4)).part is Part.NONE


def test_the_slow_are_cut_off_and_harm_nobody() -> None:
    blocks = 1000
    with (
        running_node(["--event-history", "2048"]) as node,
        Engine(node.socket, device_pages=blocks, host_pages=0) as engine,
        EventSubscriber(node.socket, engine.registration.namespace) as slow,
        EventSubscriber(node.socket, engine.registration.namespace) as quick,
    ):
        stalled = slow.subscribe(snapshot=False)
        assert next(stalled).first == 1
        mirror = BlockMirror()
        reader = threading.Thread(target=read_all, args=(quick, mirror))
        reader.start()
        rounds = 0
        while not node.counters().get("event_subscribers_cut_off"):
            churn(node, engine, blocks)
            last = next(quick.subscribe(snapshot=False)).last
            wait_until(partial(has_reached, mirror, last), "the quick one has everything")
            rounds += 1
            assert rounds < 200, "a stalled subscriber was never cut off"
        assert node.counters()["event_subscribers_cut_off"] == 1
        assert mirror.locations == {}
        with pytest.raises(SubscriberTooSlow, match="subscribe anew with a snapshot"):
            list(stalled)
        quick.close()
        reader.join()


def read_all(subscriber: EventSubscriber, mirror: BlockMirror) -> None:
    for batch in subscriber.follow():
        mirror.apply(batch)


def has_reached(mirror: BlockMirror, number: int) -> bool:
    return mirror.is_whole and mirror.last >= number


def churn(node: Node, engine: Engine, blocks: int) -> None:
    """Publish blocks without computing them, and evict them: two changes each."""
    keys = engine.keys(prompt(1, blocks))
    with engine.lease.match(keys) as sequence:
        sequence.allocate(blocks)
        sequence.publish(blocks)
    assert node.admin.Evict(admin_pb2.EvictRequest(model_id=1, tier="device")).evicted == blocks


def test_there_is_a_limit_and_who_leaves_makes_room() -> None:
    with running_node(["--event-subscribers", "2"]) as node, Engine(node.socket, host_pages=0) as engine:
        namespace = engine.registration.namespace
        with EventSubscriber(node.socket, namespace) as first, EventSubscriber(node.socket, namespace) as second:
            held = [each.subscribe() for each in (first, second)]
            assert [next(batches).part for batches in held] == [Part.FIRST, Part.FIRST]
            assert node.counters()["event_subscribers"] == 2
            with pytest.raises(LimitExceeded):
                next(first.subscribe())
        with EventSubscriber(node.socket, namespace) as third:
            wait_until(lambda: can_subscribe(third), "those who left are forgotten")


def can_subscribe(subscriber: EventSubscriber) -> bool:
    try:
        return next(subscriber.subscribe()).part is Part.FIRST
    except LimitExceeded:
        return False


def test_a_restart_is_another_epoch(folder: Path) -> None:
    mirror = BlockMirror()
    with running_node(folder=folder) as node:
        with Engine(node.socket, host_pages=0) as engine:
            engine.serve(prompt(1, 3))
            namespace = engine.registration.namespace
            subscriber = EventSubscriber(node.socket, namespace)
            batches = subscriber.follow()
            catch_up(subscriber, batches, mirror)
            epoch, last = mirror.epoch, mirror.last
            assert len(mirror.locations) == last == 3
        node.daemon.process.kill()
        node.daemon.process.wait()
        with pytest.raises(DaemonUnavailable):
            list(batches)
        subscriber.close()
    with running_node(folder=folder) as node, EventSubscriber(node.socket, namespace) as subscriber:
        with pytest.raises(NotFound):
            next(subscriber.follow())
        with Engine(node.socket, host_pages=0) as engine:
            assert engine.registration.namespace == namespace
            with pytest.raises(EventsMissed):
                next(subscriber.subscribe(snapshot=False, epoch=epoch, after=last))
            engine.serve(prompt(2, 1))
            catch_up(subscriber, subscriber.follow(), mirror)
            assert mirror.epoch != epoch
            assert mirror.locations == admin_truth(node, 1)
            assert len(mirror.locations) == 1


def test_a_stopping_daemon_says_so() -> None:
    with (
        running_node() as node,
        Engine(node.socket, host_pages=0) as engine,
        EventSubscriber(node.socket, engine.registration.namespace) as subscriber,
    ):
        batches = subscriber.follow()
        assert next(batches).part is Part.FIRST
        engine.close()
        node.daemon.process.terminate()
        with pytest.raises(DaemonUnavailable):
            list(batches)
        assert node.daemon.process.wait() == 0


async def test_the_awaited_twin_follows_too(node: Node) -> None:
    with Engine(node.socket, host_pages=0) as engine:
        engine.serve(prompt(1, 4))
        mirror = BlockMirror()
        async with AsyncEventSubscriber(node.socket, engine.registration.namespace) as subscriber:
            async for batch in subscriber.follow():
                mirror.apply(batch)
                if mirror.is_whole and not mirror.locations:
                    break
                if mirror.is_whole:
                    assert mirror.locations == admin_truth(node, 1)
                    node.admin.Evict(admin_pb2.EvictRequest(model_id=1, tier="device"))
            assert batch.runs[0].kind is Kind.REMOVED
            assert batch.runs[0].reason == "operator"


async def test_closing_ends_an_awaited_subscription_quietly(node: Node) -> None:
    with Engine(node.socket, host_pages=0) as engine:
        subscriber = AsyncEventSubscriber(node.socket, engine.registration.namespace)
        parts: list[Part] = []
        whole = asyncio.Event()

        async def collect() -> None:
            async for batch in subscriber.follow():
                parts.append(batch.part)
                if batch.part is Part.LAST:
                    whole.set()

        collecting = asyncio.ensure_future(collect())
        await whole.wait()
        await subscriber.close()
        await collecting
        assert not collecting.cancelled()
        known = len(parts)
        await collect()
        assert len(parts) == known, "a closed one opens nothing"


def test_a_closed_subscriber_opens_nothing(node: Node) -> None:
    with Engine(node.socket, host_pages=0) as engine:
        subscriber = EventSubscriber(node.socket, engine.registration.namespace)
        batches = subscriber.subscribe()
        subscriber.close()
        assert list(batches) == []
        assert list(subscriber.follow()) == []
