"""Every field of a request that can be long has a limit, and the limit holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from kvcache.v1 import cache_pb2, common_pb2, peer_pb2
from kvcache.v1.lane_pb2 import LaneHello

from cachesvc.model.errors import LimitExceeded
from cachesvc.wire.parse import CELLS, LIMITS, Where, check_fields
from tests.fuzz.target import Target, list_rpcs, running_target
from tests.fuzz.workload import registers


def has_length(field: FieldDescriptor) -> bool:
    """True for a field that a caller can make long."""
    return bool(field.is_repeated) or field.type in (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING)


def request_fields() -> Iterator[tuple[str, FieldDescriptor]]:
    """Every field that a caller can make long, of every message that a request can hold."""
    seen: set[str] = set()
    peers = (peer_pb2.BorrowRequest.DESCRIPTOR, peer_pb2.BeatRequest.DESCRIPTOR, peer_pb2.ReturnRequest.DESCRIPTOR)
    waiting: list[Any] = [LaneHello.DESCRIPTOR, *peers, *(rpc.request.DESCRIPTOR for rpc in list_rpcs().values())]
    while waiting:
        kind = waiting.pop()
        if kind.full_name in seen:
            continue
        seen.add(kind.full_name)
        for field in kind.fields:
            if field.message_type is not None:
                waiting.append(field.message_type)
            if has_length(field):
                yield f"{kind.name}.{field.name}", field


FIELDS = dict(request_fields())


def test_every_field_that_can_be_long_is_in_the_table_and_nothing_else_is() -> None:
    assert set(LIMITS) == set(FIELDS)


def too_long(name: str, field: FieldDescriptor) -> Any:
    """The field's message with one entry, letter or byte too many."""
    kind = field.containing_type
    assert kind is not None
    message: Any = GetMessageClass(kind)()
    most = LIMITS[name].most + 1
    if not field.is_repeated:
        setattr(message, field.name, b"x" * most if field.type == field.TYPE_BYTES else "x" * most)
    elif field.message_type is not None:
        for _ in range(most):
            getattr(message, field.name).add()
    else:
        values: list[Any] = ["x"] if field.type == field.TYPE_STRING else [1]
        getattr(message, field.name).extend(values * most)
    return message


@pytest.mark.parametrize("name", sorted(name for name, bound in LIMITS.items() if bound.where is Where.EDGE))
def test_the_edge_refuses_one_too_many(name: str) -> None:
    message = too_long(name, FIELDS[name])
    with pytest.raises(LimitExceeded, match=f"{name}: {LIMITS[name].most + 1} is more than"):
        check_fields(message)


def test_what_is_short_as_a_whole_is_within_every_limit() -> None:
    """Bytes and entries are no more than the message's bytes, of whatever message holds others."""
    cells = common_pb2.GroupPages(pages=b"x" * CELLS.most)
    check_fields(cache_pb2.ExtendRequest(pages=[cells]))
    cells.pages += b"x"
    for message in (cache_pb2.ExtendRequest(pages=[cells]), cache_pb2.RecycleRequest(pages=[cells])):
        with pytest.raises(LimitExceeded, match=r"GroupPages\.pages"):
            check_fields(message)
    most = LIMITS["ExtendRequest.pages"].most
    check_fields(cache_pb2.ExtendRequest(pages=[common_pb2.GroupPages()] * most))
    with pytest.raises(LimitExceeded, match=r"ExtendRequest\.pages"):
        check_fields(cache_pb2.ExtendRequest(pages=[common_pb2.GroupPages()] * (most + 1)))


def test_an_entry_of_a_list_has_its_own_limit() -> None:
    request = registers()[0]
    check_fields(request)
    request.devices[0] = "d" * 129
    with pytest.raises(LimitExceeded, match=r"RegisterRequest\.devices, an entry: 129 is more than the limit of 128"):
        check_fields(request)


def test_every_message_of_a_list_is_looked_at() -> None:
    cells = [common_pb2.GroupPages(pages=b"x") for _ in range(3)]
    cells[2].pages = b"x" * (CELLS.most + 1)
    with pytest.raises(LimitExceeded, match=r"GroupPages\.pages"):
        check_fields(cache_pb2.RecycleRequest(pages=cells))


@pytest_asyncio.fixture(loop_scope="session")
async def target() -> Any:
    async with running_target() as made:
        yield made


def with_too_many(name: str) -> tuple[str, Any]:
    """An RPC and a request that holds the field, one too long, with the rest of it sound."""
    kind = name.partition(".")[0]
    rpcs = {rpc.request.DESCRIPTOR.name: rpc.name for rpc in list_rpcs().values()}
    if kind in ("Layout", "Plane", "PlaneGroup", "RegisterRequest"):
        request = registers()[0]
        inner: Any = {
            "Layout": request.layout,
            "Plane": request.layout.planes[0],
            "PlaneGroup": request.layout.groups[0],
            "RegisterRequest": request,
        }[kind]
        inner.MergeFrom(too_long(name, FIELDS[name]))
        return "Register", request
    return rpcs[kind], too_long(name, FIELDS[name])


@pytest.mark.parametrize("name", sorted(name for name, bound in LIMITS.items() if bound.where is Where.FLOW))
async def test_flows_refuse_one_too_many(target: Target, name: str) -> None:
    rpc, request = with_too_many(name)
    if "lease_id" in request.DESCRIPTOR.fields_by_name:
        request.lease_id = await target.open_lease()
        match = cache_pb2.MatchRequest(lease_id=request.lease_id, sequence_id=0 if rpc == "Publish" else 1)
        await target.call(list_rpcs()["Match"], [match.SerializeToString()])
    if rpc == "Step":
        request.request_id = 1
    code, answers = await target.call(list_rpcs()[rpc], [request.SerializeToString()])
    refused = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE)
    assert code in refused or answers[0].error.code in ("INVALID", "LIMIT"), (code, answers)
    assert target.crashes == []


async def test_a_long_name_of_an_engine_is_cut(target: Target) -> None:
    lease = await target.open_lease(engine="e" * 1000)
    assert len(target.core.ledger.leases[lease].engine) == LIMITS["OpenRequest.engine"].most
