"""Messages that are refused before they are parsed, and no others."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from kvcache.v1 import admin_pb2, cache_pb2, common_pb2, engine_pb2

from cachesvc.model.errors import InvalidRequest, LimitExceeded
from cachesvc.wire.parse import LIMITS, MAX_FIELDS, WALKED_BYTES, most_bytes, parse, require_bounded
from cachesvc.wire.status import MAX_MESSAGE_BYTES
from tests.fuzz.target import list_rpcs
from tests.long_cases import looped
from tests.work import steps_of

REQUESTS = {name: rpc.request for name, rpc in list_rpcs().items()}


def nested(number: int, inside: bytes) -> bytes:
    """A field that holds a message of these bytes."""
    size, length = len(inside), b""
    while size >= 0x80:
        length += bytes((size & 0x7F | 0x80,))
        size >>= 7
    return bytes((number << 3 | 2,)) + length + bytes((size,)) + inside


def field_number(kind: Any, name: str) -> int:
    """A field's number."""
    return int(kind.DESCRIPTOR.fields_by_name[name].number)


def empties(kind: Any, field: str, size_bytes: int) -> bytes:
    """Empty entries of a list, ``size_bytes`` in all."""
    return nested(field_number(kind, field), b"") * (size_bytes // 2)


@pytest.mark.parametrize(
    ("kind", "raw", "words"),
    [
        (cache_pb2.StepRequest, empties(cache_pb2.StepRequest, "operations", MAX_MESSAGE_BYTES), "operations: 4097 is"),
        (admin_pb2.ListBlocksRequest, empties(admin_pb2.ListBlocksRequest, "key_hex", MAX_MESSAGE_BYTES), "bytes of"),
        (admin_pb2.ListBlocksRequest, empties(admin_pb2.ListBlocksRequest, "key_hex", 1 << 20), "key_hex: 4097 is"),
        (cache_pb2.RecycleRequest, empties(cache_pb2.RecycleRequest, "pages", 1 << 20), "pages: "),
        (admin_pb2.GetStatusRequest, b"\x0a\x00" * (1 << 20), "bytes of GetStatusRequest: 2097152"),
        (cache_pb2.MatchRequest, b"\x0a\x00" * (1 << 20), "lease_id: 2 is more than the limit of 1"),
        (cache_pb2.StepRequest, b"\xf8\x3f\x00" * (1 << 20), f"fields of a message: {MAX_FIELDS + 1}"),
    ],
    ids=["operations", "keys", "fewer keys", "pages", "no fields", "one field again", "unknown fields"],
)
def test_entries_without_number_are_refused_before_there_is_an_object_of_each(
    kind: Any, raw: bytes, words: str
) -> None:
    with pytest.raises(LimitExceeded, match=words):
        parse(kind, raw)


def test_entries_within_a_message_within_a_message_count_too() -> None:
    recycle = empties(cache_pb2.RecycleRequest, "pages", 200)
    operation = nested(field_number(cache_pb2.StepOperation, "recycle"), recycle)
    raw = nested(field_number(cache_pb2.StepRequest, "operations"), operation) * 2000
    assert len(raw) > WALKED_BYTES
    with pytest.raises(LimitExceeded, match=r"RecycleRequest\.pages: |fields of a message"):
        parse(cache_pb2.StepRequest, raw)


def full(kind: Any, depth: int, pick: Callable[[int], int]) -> Any:
    """A message with every list and text as long as it may be, or shorter by ``pick``."""
    message: Any = GetMessageClass(kind)()
    for field in kind.fields:
        if field.containing_oneof is not None and field.containing_oneof.fields[0] is not field:
            continue
        bound = LIMITS.get(f"{kind.name}.{field.name}")
        most = pick(1 if bound is None else bound.most)
        if field.message_type is not None:
            if depth and field.is_repeated:
                for _ in range(min(most, 3)):
                    getattr(message, field.name).append(full(field.message_type, depth - 1, pick))
            elif depth:
                getattr(message, field.name).CopyFrom(full(field.message_type, depth - 1, pick))
        elif field.type == FieldDescriptor.TYPE_BYTES and not field.is_repeated:
            setattr(message, field.name, b"x" * most)
        elif field.type == FieldDescriptor.TYPE_STRING and not field.is_repeated:
            setattr(message, field.name, "x" * most)
        elif field.type == FieldDescriptor.TYPE_STRING:
            getattr(message, field.name).extend(["x" * (bound.each if bound else 1)] * most)
        elif field.is_repeated and field.type in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64):
            getattr(message, field.name).extend([0xFFFFFFFF] * most)
    return message


@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_no_message_within_its_limits_is_refused(name: str) -> None:
    rng = random.Random(name)
    kind = REQUESTS[name]
    for pick in (lambda most: most, lambda most: rng.randint(0, most)):
        raw = full(kind.DESCRIPTOR, 4, pick).SerializeToString()
        if len(raw) <= MAX_MESSAGE_BYTES:
            assert len(raw) <= most_bytes(kind.DESCRIPTOR)
            require_bounded(kind.DESCRIPTOR, raw)


def test_a_step_as_large_as_a_client_sends_one_is_parsed() -> None:
    pages = common_pb2.GroupPages(group=1, pages=b"page" * 10, generations=b"some" * 10)
    extend = cache_pb2.ExtendRequest(sequence_id=1 << 40, pages=[pages, pages])
    step = cache_pb2.StepRequest(lease_id="x" * 32, request_id=1 << 50)
    step.operations.extend([cache_pb2.StepOperation(extend=extend)] * 4096)
    raw = step.SerializeToString()
    assert len(raw) > WALKED_BYTES
    assert parse(cache_pb2.StepRequest, raw) == step


@looped("seed", range(20))
def test_broken_bytes_are_refused_by_name_however_long(seed: int) -> None:
    rng = random.Random(seed)
    layout = common_pb2.Layout(planes=[common_pb2.Plane(name="x" * 100, page_shape=[1, 2, 3])] * 1000)
    raw = bytearray(engine_pb2.RegisterRequest(model="m", layout=layout).SerializeToString())
    assert len(raw) > WALKED_BYTES
    for _ in range(rng.randint(1, 50)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    cut = bytes(raw[: rng.randint(WALKED_BYTES + 1, len(raw))])
    with contextlib.suppress(InvalidRequest, LimitExceeded):  # or it is still a message
        assert isinstance(parse(engine_pb2.RegisterRequest, cut), engine_pb2.RegisterRequest)
    with pytest.raises(InvalidRequest, match="not a RegisterRequest"):
        parse(engine_pb2.RegisterRequest, b"\xff" * (WALKED_BYTES + 1))
    with pytest.raises(InvalidRequest, match="has groups"):
        parse(engine_pb2.RegisterRequest, b"\x0b" * (WALKED_BYTES + 1))


def recycles(operations: int, groups: int) -> bytes:
    """A Step that gives a page of each group back for each of many sequences."""
    step = cache_pb2.StepRequest(lease_id="x" * 32, request_id=1 << 50)
    pages = [common_pb2.GroupPages(group=group, pages=b"page") for group in range(groups)]
    for number in range(operations):
        step.operations.add(recycle=cache_pb2.RecycleRequest(sequence_id=number + 1, pages=pages))
    return step.SerializeToString()


def test_small_operations_of_a_long_step_are_stepped_over() -> None:
    raw = recycles(4096, 4)
    assert len(raw) > WALKED_BYTES
    assert steps_of(lambda: require_bounded(cache_pb2.StepRequest.DESCRIPTOR, raw)) < 100 * 4096
    parse(cache_pb2.StepRequest, raw)


def test_small_entries_that_are_stepped_over_are_bounded_in_all() -> None:
    """Each is within its limits, and all together would be objects without number."""
    recycle = empties(cache_pb2.RecycleRequest, "pages", 100)
    operation = nested(field_number(cache_pb2.StepOperation, "recycle"), recycle)
    raw = nested(field_number(cache_pb2.StepRequest, "operations"), operation) * 4096
    with pytest.raises(LimitExceeded, match="fields of a message"):
        parse(cache_pb2.StepRequest, raw)


def test_an_entry_that_says_it_is_longer_than_its_message_is_refused() -> None:
    raw = recycles(4095, 4) + bytes((field_number(cache_pb2.StepRequest, "operations") << 3 | 2, 100)) + b"short"
    with pytest.raises(InvalidRequest, match="not a StepRequest"):
        require_bounded(cache_pb2.StepRequest.DESCRIPTOR, raw)


def test_an_entry_that_may_break_a_limit_is_walked_however_small() -> None:
    shape = bytes((field_number(common_pb2.Plane, "page_shape") << 3, 1)) * 20
    planes = nested(field_number(common_pb2.Layout, "planes"), shape) * 2000
    raw = nested(field_number(engine_pb2.RegisterRequest, "layout"), planes)
    assert len(raw) > WALKED_BYTES
    with pytest.raises(LimitExceeded, match=r"Plane\.page_shape: "):
        parse(engine_pb2.RegisterRequest, raw)
