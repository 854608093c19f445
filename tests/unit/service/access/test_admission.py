"""Places for calls: by what they are, in all, and for each process and tenant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from cachesvc.model.errors import LimitExceeded, QuotaExceeded
from cachesvc.service.access.admission import Admission, CallKind, Holder, Slot
from cachesvc.service.access.auth import EVERYONE, set_caller
from cachesvc.service.access.quota import NO_QUOTA, Quota, Quotas
from tests.fuzz.target import CallContext
from tests.unit.rigs.dispatch_rig import Desk, turns
from tests.unit.rigs.ledger_rig import one_group, rig_of


def take(admission: Admission, kind: CallKind, process: str, count: int, tenant: str = "") -> list[Slot]:
    """Take up to ``count`` places."""
    places = []
    for _ in range(count):
        try:
            places.append(admission.take(kind, admission.holder(process, tenant)))
        except LimitExceeded:
            break
    return places


def quotas(quota: Quota = NO_QUOTA) -> Quotas:
    return Quotas(rig_of(one_group(), device=(4,)).core, lambda _: quota)


def test_one_process_leaves_room_for_the_next_and_two_share() -> None:
    admission = Admission(8, 8, 4)
    first = take(admission, CallKind.WORK, "a", 8)
    assert len(first) == 6, "three quarters"
    assert len(take(admission, CallKind.WORK, "b", 8)) == 2, "what is left"
    for place in first[2:]:
        place.leave()
    assert len(take(admission, CallKind.WORK, "a", 8)) == 2, "a has its half"
    assert len(take(admission, CallKind.WORK, "b", 8)) == 2, "and b"
    with pytest.raises(LimitExceeded, match="calls in flight: 9 is more than the limit of 8"):
        admission.take(CallKind.WORK, Holder("c", None))


def test_waiting_calls_have_places_of_their_own() -> None:
    admission = Admission(2, 8, 4)
    assert len(take(admission, CallKind.WAITS, "a", 100)) == 4
    assert len(take(admission, CallKind.WAITS, "b", 100)) == 4
    with pytest.raises(LimitExceeded, match="waiting calls: 9 is more than the limit of 8"):
        admission.take(CallKind.WAITS, Holder("c", None))
    assert len(take(admission, CallKind.WORK, "a", 1)) == 1


def test_a_call_that_begins_to_wait_gives_its_place_back() -> None:
    admission = Admission(1, 1, 1)
    [place] = take(admission, CallKind.WORK, "a", 1)
    place.wait()
    assert (admission.work.held, admission.waits.held) == (0, 1)
    [other] = take(admission, CallKind.WORK, "b", 1)
    with pytest.raises(LimitExceeded):
        other.wait()
    assert (admission.work.held, admission.waits.held) == (1, 1), "it stays what it was"
    place.leave()
    other.wait()
    other.leave()
    assert (admission.work.held, admission.waits.held) == (0, 0)
    with pytest.raises(AssertionError):
        other.leave()


def test_signs_of_life_find_room_in_a_full_house() -> None:
    admission = Admission(1, 1, 1, quotas(Quota(calls_per_second=1, calls_in_flight=1)))
    take(admission, CallKind.WORK, "a", 1)
    holder = admission.holder("a", "")
    for kind in (CallKind.WORK, CallKind.WAITS):
        with pytest.raises((LimitExceeded, QuotaExceeded)):
            admission.admit(kind, holder, 1.0)
    for _ in range(1000):
        admission.admit(CallKind.LIFE, holder, 1.0)


def test_signs_of_life_are_charged_and_the_debt_ends() -> None:
    admission = Admission(8, 8, 8, quotas(Quota(calls_per_second=2)))
    holder = admission.holder("a", "")
    for _ in range(100):
        admission.admit(CallKind.LIFE, holder, 1.0)
    with pytest.raises(QuotaExceeded, match="calls_per_second"):
        admission.admit(CallKind.WORK, holder, 2.0)
    admission.admit(CallKind.WORK, holder, 3.0)


def test_a_tenant_alone_leaves_room_and_two_share_whatever_their_processes() -> None:
    admission = Admission(16, 16, 16, quotas())
    first = [place for name in "abcd" for place in take(admission, CallKind.WORK, name, 4, "one")]
    assert len(first) == 12
    assert len(take(admission, CallKind.WORK, "e", 16, "two")) == 4, "its process is one of four"
    for place in first[:2]:
        place.leave()
    with pytest.raises(LimitExceeded, match="calls in flight of this tenant: 11 is more than the limit of 8"):
        admission.admit(CallKind.WORK, admission.holder("a", "one"), 1.0)


def test_a_quota_of_calls_in_flight_counts_those_that_wait_too() -> None:
    admission = Admission(8, 8, 8, quotas(Quota(calls_in_flight=1)))
    holder = admission.holder("a", "")
    told = "quota calls_in_flight of the shared tenant: 2 is more than the limit of 1"
    for kind in (CallKind.WORK, CallKind.WAITS):
        admission.admit(kind, holder, 1.0)
        place = admission.take(kind, holder)
        with pytest.raises(QuotaExceeded, match=told):
            admission.admit(CallKind.WORK, holder, 1.0)
        place.leave()


class From(CallContext):
    """A call from somewhere."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def peer(self) -> str:
        return self._where


async def test_streams_on_which_nothing_comes_are_counted_and_one_caller_has_its_share_of_them() -> None:
    ends = asyncio.Event()

    async def silence() -> AsyncIterator[Any]:
        await ends.wait()
        empty: tuple[Any, ...] = ()
        for nothing in empty:
            yield nothing

    async with Desk() as desk:
        set_caller(EVERYONE)
        desk.admission.streams.limit = 8

        def open_one(where: str) -> tuple[From, asyncio.Task[Any]]:
            context: Any = From(where)
            stream = (
                desk.cache.Step(silence(), context) if where == "steps" else desk.leases.KeepAlive(silence(), context)
            )
            return context, asyncio.ensure_future(anext(stream, None))

        opened = [open_one("steps") for _ in range(9)]
        await turns(3)
        assert [context.code.name for context, _ in opened].count("OK") == 6, "three quarters alone"
        assert opened[-1][0].code is grpc.StatusCode.OUT_OF_RANGE
        other, _ = beat = open_one("beats")
        await turns(3)
        assert (other.code, desk.admission.streams.held) == (grpc.StatusCode.OK, 7)
        ends.set()
        await asyncio.gather(*(task for _, task in (*opened, beat)), return_exceptions=True)
        assert desk.admission.streams.held == 0
