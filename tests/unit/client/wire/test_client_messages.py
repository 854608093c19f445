"""Requests carry what the caller said, answers say what the daemon sent, and the table of methods is the protos'."""

from __future__ import annotations

import pickle
from array import array
from itertools import product
from typing import Any

import pytest
from cachesvc_client import CacheClient
from cachesvc_client.core.errors import InvalidRequest, NotSupported
from cachesvc_client.layouts.families import gqa_windowed
from cachesvc_client.records.sequence_record import SequenceRecord
from cachesvc_client.wire import messages, methods
from cachesvc_client.wire.methods import Method
from cachesvc_client.wire.settings import ChannelOptions, Retries, Timeouts
from kvcache.v1 import cache_pb2, common_pb2, engine_pb2, lease_pb2

from cachesvc.model.answers import GroupCells, TicketView
from cachesvc.model.words import TimelineSlot
from cachesvc.wire.columns import GROW, OPERATION_NAMES
from cachesvc.wire.convert import layout_from_proto, ticket_to_proto
from tests.unit.rigs.client_rig import FakeDaemon

LAYOUT = gqa_windowed(
    window_layers=[False, True], kv_heads=2, head_dim=8, block_tokens=4, window_tokens=9, sink_tokens=4
)


def all_methods() -> list[Method[Any, Any]]:
    return [value for value in vars(methods).values() if isinstance(value, Method)]


def test_every_rpc_for_engines_is_a_method_with_its_messages_and_its_operation() -> None:
    mine = {(m.service, m.name): m for m in all_methods()}
    for module in (engine_pb2, lease_pb2, cache_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for rpc in service.methods:
                method = mine[service.name, rpc.name]
                assert method.request.DESCRIPTOR is rpc.input_type
                assert method.response.DESCRIPTOR is rpc.output_type
                assert method.path == f"/{service.full_name}/{rpc.name}"
    fields = cache_pb2.StepOperation.DESCRIPTOR.fields_by_name
    operations = {method.step_field: method for method in all_methods() if method.step_field}
    assert set(operations) | {OPERATION_NAMES[GROW]} == set(fields), "growth is always an entry of a column"
    for name, method in operations.items():
        assert method.request.DESCRIPTOR is fields[name].message_type


def test_register_says_pools_as_pages_as_a_share_or_not_at_all(daemon: FakeDaemon) -> None:
    with CacheClient(daemon.path) as client:
        registration = client.register("m", LAYOUT, device_pages=[4, 2], host_share=0.5)
        assert pickle.loads(pickle.dumps(registration)) == registration, "it can be handed to a worker"
        client.register("m", LAYOUT)
        with pytest.raises(InvalidRequest, match="not both"):
            client.register("m", LAYOUT, host_pages=[1, 1], host_share=0.5)
        with pytest.raises(NotSupported, match="reserves 0 pages, not 2"):
            client.register("m", LAYOUT, reserved_pages=2)
    named, bare, reserving = daemon.seen["Register"]
    assert layout_from_proto(named.layout) == LAYOUT
    assert (list(named.device_pool.pages.pages), named.host_pool.share) == ([4, 2], 0.5)
    assert not bare.HasField("device_pool")
    assert reserving.reserved_pages == 2


def test_a_ticket_survives_the_wire() -> None:
    slots = (None, TimelineSlot(word=2, failed_word=3, base=7, layers=4))
    for state, slot in product(("running", "done", "failed"), slots):
        ticket = TicketView(5, state, "why", slot, "load", 3, 4096)
        assert messages.parse_tickets([ticket_to_proto(ticket)]) == (ticket,)
        assert pickle.loads(pickle.dumps(ticket)) == ticket
    (newer,) = messages.parse_tickets([common_pb2.Ticket(id=1)])
    assert newer.state == "running", "a state of a newer daemon has not ended"


def test_published_duplicates_keep_position_and_group() -> None:
    response = cache_pb2.PublishResponse(
        sealed_blocks=3,
        duplicate_positions=(1).to_bytes(4, "little") + (2).to_bytes(4, "little"),
        duplicates=[common_pb2.GroupPages(group=1, pages=(7).to_bytes(4, "little") * 2)],
        pending=True,
    )
    answer = messages.parse_publish(response)
    assert answer.duplicate_positions == (1, 2)
    assert answer.duplicates == (GroupCells(1, 0, array("i", (7, 7))),)
    assert answer.pending


def test_settings_are_checked_when_they_are_made() -> None:
    with pytest.raises(InvalidRequest, match="call_s"):
        Timeouts(call_s=0)
    with pytest.raises(InvalidRequest, match="attempt"):
        Retries(attempts=0)
    assert list(Retries(attempts=4, pause_s=1).pauses()) == [1, 2, 4]
    assert ("grpc.keepalive_time_ms", 5) in ChannelOptions(keepalive_ms=5).as_grpc()
    assert not any("keepalive" in name for name, _ in ChannelOptions().as_grpc())


def test_a_match_and_a_release_tell_what_eviction_learns_from() -> None:
    sequence = SequenceRecord(1, LAYOUT)
    assert sequence.open(b"", 0, 1.5).request.waited_ms == 1500
    assert not sequence.release().request.HasField("output_tokens")
    sequence.output_tokens = 0
    assert sequence.release().request.HasField("output_tokens"), "nothing put out is an answer too"
