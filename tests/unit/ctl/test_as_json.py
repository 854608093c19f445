"""Answers as JSON: every field is there, whatever its value, and numbers are numbers."""

from __future__ import annotations

import json

from cachesvc_ctl.core.command import as_json
from kvcache.v1 import admin_pb2, common_pb2, inspect_pb2

from cachesvc.wire.plain import plain


def test_what_is_empty_or_zero_is_there() -> None:
    assert plain(admin_pb2.ListLeasesResponse()) == {"leases": []}
    assert plain(admin_pb2.EvictResponse()) == {"evicted": 0}
    status = plain(admin_pb2.GetStatusResponse())
    assert status.keys() == {field.name for field in admin_pb2.GetStatusResponse.DESCRIPTOR.fields}
    assert (status["config"], status["counters"], status["pools"], status["draining"]) == ({}, {}, [], False)
    assert status["hits"] is None, "a message that is not set"


def test_numbers_of_64_bits_are_numbers() -> None:
    status = admin_pb2.GetStatusResponse(epoch=2**63 - 1, counters={"b": 2**40, "a": 0})
    status.pools.add(capacity=2**53 + 1, place="host")
    read = json.loads(as_json(status))
    assert read["epoch"] == 2**63 - 1
    assert list(read["counters"].items()) == [("a", 0), ("b", 2**40)]
    assert read["pools"][0]["capacity"] == 2**53 + 1
    assert read["pools"][0]["free"] == 0


def test_bytes_are_hexadecimal_and_enums_names() -> None:
    block = admin_pb2.BlockStatus(key=b"\x01\xff", key_hex="01ff")
    assert plain(block)["key"] == plain(block)["key_hex"] == "01ff"
    ticket = common_pb2.Ticket(id=7, state=common_pb2.TICKET_STATE_DONE)
    assert plain(ticket)["state"] == "TICKET_STATE_DONE"


def test_an_optional_field_is_null_where_it_was_not_given() -> None:
    group = common_pb2.PlaneGroup(name="full")
    optional = [field.name for field in group.DESCRIPTOR.fields if field.has_presence and field.message_type is None]
    assert optional, "this message has one"
    assert {plain(group)[name] for name in optional} == {None}


def test_messages_within_messages() -> None:
    answer = inspect_pb2.ListTenantsResponse()
    tenant = answer.tenants.add(tenant="a")
    tenant.used["leases"] = 3
    (read,) = plain(answer)["tenants"]
    assert (read["tenant"], read["used"], read["limits"]) == ("a", {"leases": 3}, {})
