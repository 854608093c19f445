"""Remembered answers: by count, and beyond the last few by bytes."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.message import Message
from kvcache.v1 import cache_pb2

from cachesvc.model.errors import KeyReused
from cachesvc.service.calls.dispatcher import (
    KEEP_ANSWERS,
    KEEP_BYTES,
    KEEP_CONTENTS_BYTES,
    KEEP_LEAST,
    KEEP_MOST_BYTES,
    TENANT_BYTES,
    AnswerBudget,
    Mark,
    Repeats,
    mark_of,
)

MARK = ("Call", cache_pb2.ReleaseRequest, b"")


def as_we_write(name: str, request: Message) -> Mark:
    """The mark of a request from an encoder like ours."""
    return mark_of(name, request, request.SerializeToString())


def kept(answers: int, size_bytes: int) -> list[int]:
    """Remembered ones of ``answers`` answers of a size."""
    repeats = Repeats(AnswerBudget())
    text = "x" * size_bytes
    for number in range(1, answers + 1):
        repeats.keep(number, MARK, cache_pb2.OperationError(message=text))
    return [number for number in range(1, answers + 1) if repeats.find(number, MARK) is not None]


def test_small_answers_are_kept_by_count() -> None:
    assert kept(300, 10) == list(range(301 - KEEP_ANSWERS, 301))


def test_large_ones_are_kept_as_far_as_their_bytes_allow() -> None:
    assert kept(200, KEEP_BYTES // 64) == list(range(201 - 63, 201))
    assert kept(200, KEEP_MOST_BYTES // 33) == list(range(201 - KEEP_LEAST, 201)), "the last few always"
    assert kept(40, KEEP_BYTES) == list(range(34, 41)), "but no more than its limit of bytes"
    assert kept(5, KEEP_MOST_BYTES) == [5], "whatever it takes, the last one"


def test_an_id_with_other_contents_is_refused() -> None:
    repeats = Repeats(AnswerBudget())
    release = cache_pb2.ReleaseRequest(lease_id="a", sequence_id=1)
    mark = as_we_write("Release", release)
    repeats.keep(7, mark, cache_pb2.ReleaseResponse(freed_pages=3))
    assert repeats.find(7, as_we_write("Release", release)).freed_pages == 3
    others = [as_we_write("Release", cache_pb2.ReleaseRequest(sequence_id=2)), as_we_write("Swap", release)]
    large = [as_we_write("Match", cache_pb2.MatchRequest(keys=bytes([n]) * KEEP_CONTENTS_BYTES)) for n in (1, 1, 2)]
    assert large[0] == large[1] != large[2]
    assert isinstance(large[0][2], int), "a request that large is not kept itself"
    for other in others:
        with pytest.raises(KeyReused):
            repeats.find(7, other)


@pytest.mark.parametrize("key_bytes", [32, KEEP_CONTENTS_BYTES - 6])
def test_an_equal_request_may_be_written_otherwise(key_bytes: int) -> None:
    """Another encoder, or another way, may put its fields in another order and write what is left out by default."""
    request = cache_pb2.MatchRequest(sequence_id=5, keys=bytes(key_bytes))
    ours = request.SerializeToString()
    assert ours.startswith(b"\x18\x05")
    theirs = ours[2:] + ours[:2] + b"\x28\x00"
    assert cache_pb2.MatchRequest.FromString(theirs) == request
    repeats = Repeats(AnswerBudget())
    repeats.keep(1, mark_of("Match", request, theirs), cache_pb2.MatchResponse(device_blocks=2))
    assert repeats.find(1, mark_of("Match", request, ours)).device_blocks == 2
    repeats.keep(2, mark_of("Match", request, ours), cache_pb2.MatchResponse(device_blocks=3))
    assert repeats.find(2, mark_of("Match", request, theirs)).device_blocks == 3
    assert (
        repeats.find(
            1, mark_of("Match", request, request.SerializeToString(deterministic=True), is_ours=True)
        ).device_blocks
        == 2
    )


async def test_a_call_under_way_is_found_and_never_pushed_out() -> None:
    repeats = Repeats(AnswerBudget())
    first: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    repeats.begin(1, MARK, first)
    for number in range(2, 2 + 2 * KEEP_ANSWERS):
        repeats.keep(number, MARK, cache_pb2.ReleaseResponse())
    assert repeats.find(1, MARK) is first
    with pytest.raises(KeyReused):
        repeats.find(1, ("Other", cache_pb2.ReleaseRequest, b""))
    repeats.end(1)
    assert repeats.find(1, MARK) is None, "it was not kept: who asks again starts anew"


def test_answers_of_many_leases_cost_their_tenant_and_not_the_daemon() -> None:
    budget = AnswerBudget()
    answer = cache_pb2.OperationError(message="x" * (4 << 20))
    leases = [Repeats(budget) for _ in range(100)]
    for repeats in leases:
        for number in (1, 2, 3):
            repeats.keep(number, MARK, answer)
    assert budget.held <= 2 * TENANT_BYTES + answer.ByteSize()
    assert sum(repeats.find(1, MARK) is not None for repeats in leases) < TENANT_BYTES // answer.ByteSize()
    assert leases[0].find(3, MARK) is answer, "who was there first keeps its own"
    small = cache_pb2.ReleaseResponse()
    for repeats in leases:
        repeats.keep(9, MARK, small)
        assert repeats.find(9, MARK) is small
    for repeats in leases:
        repeats.forget()
    assert (budget.held, budget.leases) == (0, 0)
