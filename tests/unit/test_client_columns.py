"""Columns of an engine: one table of all sequences' cells and steps by arrays, with the outcome that handles have,
whether the daemon knows columns or not. The daemon is the real one, but for the socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cachesvc_client.errors import (
    CacheClientError,
    Conflict,
    InvalidRequest,
    LimitExceeded,
    NotOwned,
    QuotaExceeded,
    StockEmpty,
)
from cachesvc_client.records.batches import StepBatch
from cachesvc_client.records.columns import ColumnsRecord
from cachesvc_client.records.columns_part import ColumnsPart, OddEntry
from cachesvc_client.records.lease_record import LeaseRecord
from cachesvc_client.records.sequence_record import SequenceRecord
from cachesvc_client.records.steps import StepBook
from cachesvc_client.records.stock import Stock
from cachesvc_client.registration import Registration
from kvcache.v1 import cache_pb2, lease_pb2

from cachesvc.model.answers import Published
from cachesvc.policy.hazard.history import History
from tests.unit.dispatch_rig import Desk
from tests.unit.ledger_rig import chain, rig_of, windowed


class Handle:
    def __init__(self, record: SequenceRecord) -> None:
        self.record = record


class Engine:
    """The client's side of one lease, over a desk."""

    def __init__(self, desk: Desk, *, has_columns: bool = True, stock: int = 8) -> None:
        self.desk = desk
        layout = desk.rig.model.layout
        registration = Registration(1, 0, b"", (64,), (0,), ("gpu-0",), 1, layout, existed=False)
        opened = lease_pb2.OpenResponse(lease_id=desk.lease(), silence_limit_ms=1000, step_columns=has_columns)
        self.lease = LeaseRecord(opened, registration, threading.Event())
        self.lease.stock = Stock([stock] * len(layout.groups))
        self.book = StepBook(self.lease)
        self.columns: ColumnsRecord[Handle] = ColumnsRecord(self.lease, 4, 8, None)

    async def step(self, batch: StepBatch[Any] | None = None, part: ColumnsPart | None = None) -> list[Any]:
        step = self.book.enter(batch, part)
        served = self.desk.ask(self.desk.cache.step, cache_pb2.StepRequest.FromString(step.sent.SerializeToString()))
        answer = await served if isinstance(served, asyncio.Future) else served
        if not isinstance(answer, cache_pb2.StepResponse):
            answer = cache_pb2.StepResponse(request_id=step.request.request_id, error=answer)
        self.book.answer(answer)
        return step.outcome()

    async def submit(
        self, grow: Any = None, publish: Any = None, recycle: Any = None, release: Any = None, batch: Any = None
    ) -> list[OddEntry]:
        part = self.columns.part(grow, publish, recycle, release)
        await self.step(batch, part)
        self.desk.rig.check()
        return part.odd

    def batch(self) -> StepBatch[Handle]:
        return StepBatch(self.lease, Handle)

    async def open(self, prompt: str, *, blocks: int | None = None) -> Handle:
        batch = self.batch()
        batch.match(chain(*prompt))
        [handle] = await self.step(batch)
        batch = self.batch()
        batch.allocate(handle, blocks or len(prompt))
        await self.step(batch)
        return handle  # type: ignore[no-any-return]

    def same(self, slot: int) -> None:
        """The table has what the daemon has."""
        held = self.desk.rig.core.ledger.leases[self.lease.id].sequences[int(self.columns.ids[slot])]
        for table, cells in zip(held.tables, self.columns.tables, strict=True):
            blocks = int(self.columns.blocks[slot])
            assert cells[slot, :blocks].tolist() == list(table)
            assert (cells[slot, blocks:] == -1).all()
        assert self.columns.sealed[slot] == held.sealed


BOTH = pytest.mark.parametrize("has_columns", [True, False], ids=["columns", "operations"])


@BOTH
async def test_an_iteration_of_arrays_grows_publishes_recycles_and_releases(has_columns: bool) -> None:
    async with Desk(rig_of(windowed(), device=(40, 40))) as desk:
        engine = Engine(desk, has_columns=has_columns)
        columns = engine.columns
        slots = [columns.add(await engine.open(prompt)) for prompt in ("ab", "cd", "ef")]
        assert await engine.submit(grow=(slots, [1, 2, 1]), publish=(slots, 2)) == []
        assert columns.blocks[slots].tolist() == [3, 4, 3]
        assert columns.sealed[slots].tolist() == [2, 2, 2]
        new = b"".join(chain(*prompt)[-32:] for prompt in ("abx", "efx"))
        assert await engine.submit(grow=slots[:1], publish=([0, 2], 3, new), recycle=(slots, 8 + 4)) == []
        for slot in slots:
            engine.same(slot)
        assert columns.tables[1, 0].tolist()[:2] == [-1, columns.tables[1, 0, 1]], "behind the window"
        assert await engine.submit(release=[1, 2]) == []
        assert not columns.ids[[1, 2]].any()
        assert (columns.tables[:, 1:] == -1).all()
        assert columns.add(await engine.open("cd")) == 1
        assert columns.take(0).record.blocks == 4


@BOTH
async def test_duplicates_come_back_odd_with_the_table_corrected_and_the_spares_given_back(has_columns: bool) -> None:
    async with Desk(rig_of(windowed(), device=(40, 40))) as desk:
        engine = Engine(desk, has_columns=has_columns)
        columns = engine.columns
        slots = [columns.add(await engine.open(prompt)) for prompt in ("ab", "ab", "cd")]
        (odd,) = await engine.submit(publish=(slots, 2))
        assert (odd.call, odd.slot) == ("publish", 1)
        assert isinstance(odd.result, Published)
        assert odd.result.duplicate_positions == (0, 1)
        assert columns.tables[0, 1, :2].tolist() == columns.tables[0, 0, :2].tolist()
        for slot in slots:
            engine.same(slot)
        free = desk.rig.free()
        assert await engine.submit(recycle=(slots[:1], 0)) == []
        assert sum(desk.rig.free()) > sum(free) - 16, "the spares of all slots are back"
        own = desk.rig.core.ledger.leases[engine.lease.id].sequences[int(columns.ids[1])].own
        assert own == [set(), set()]


@BOTH
async def test_refusals_are_told_by_slot_and_leave_the_others(has_columns: bool) -> None:
    async with Desk() as desk:
        engine = Engine(desk, has_columns=has_columns)
        columns = engine.columns
        slots = [columns.add(await engine.open(prompt)) for prompt in ("ab", "cd")]
        (odd,) = await engine.submit(publish=(slots, [2, 3], chain(*"ab") + chain(*"cdx")))
        assert (odd.call, odd.slot, type(odd.result)) == ("publish", 1, NotOwned)
        assert await engine.submit(publish=([1], 2)) == [], "asked again from where it was"
        held = desk.rig.core.ledger.leases[engine.lease.id].sequences
        del held[int(columns.ids[0])].own[0]
        engine.same(1)


async def test_what_cannot_be_is_refused_before_anything_changes() -> None:
    async with Desk() as desk:
        engine = Engine(desk)
        columns = engine.columns
        handle = await engine.open("ab")
        slot = columns.add(handle)
        wrong: list[tuple[dict[str, Any], type[CacheClientError], str]] = [
            ({"grow": [slot, slot]}, InvalidRequest, "named twice"),
            ({"grow": [3]}, InvalidRequest, "holds no sequence"),
            ({"grow": [-1]}, InvalidRequest, "holds no sequence"),
            ({"grow": ([slot], 0)}, InvalidRequest, "at least 1 block"),
            ({"grow": ([slot], 7)}, LimitExceeded, "a row has 8 blocks"),
            ({"grow": ([slot], 6)}, StockEmpty, "wanted 6 blocks"),
            ({"grow": [slot], "publish": ([slot], 0)}, InvalidRequest, "by at least 1 block"),
            ({"grow": [slot], "publish": ([slot], 2, b"k")}, InvalidRequest, "bytes of keys"),
            ({"grow": [slot], "publish": ([slot], 3)}, InvalidRequest, "not told"),
            ({"grow": [[slot]]}, InvalidRequest, "flat list"),
        ]
        for fields, kind, what in wrong:
            if kind is StockEmpty:
                assert engine.lease.stock is not None
                engine.lease.stock.take_packed(4)
            with pytest.raises(kind, match=what):
                columns.part(**({"grow": None, "publish": None, "recycle": None, "release": None} | fields))
            assert (columns.blocks[slot], columns.asked[slot], columns.parts) == (2, 0, [])
        with pytest.raises(Conflict, match="lent to columns"):
            handle.record.allocate(3)
        with pytest.raises(Conflict, match="lent to columns"):
            columns.add(handle)
        with pytest.raises(InvalidRequest, match="holds no sequence"):
            columns.take(1)
        with pytest.raises(InvalidRequest, match="int32"):
            ColumnsRecord(engine.lease, 4, 8, np.zeros((1, 4, 8), np.int64))


async def test_slots_that_were_sound_for_the_last_step_are_looked_at_again_where_something_changed() -> None:
    async with Desk() as desk:
        engine = Engine(desk)
        columns = engine.columns
        slots = np.array([columns.add(await engine.open("ab")), columns.add(await engine.open("cd"))])
        for _ in range(2):
            assert await engine.submit(grow=slots) == []
        twice = slots.copy()
        slots[1] = slots[0]
        with pytest.raises(InvalidRequest, match="named twice"):
            columns.part(slots, None, None, None)
        assert await engine.submit(release=twice[:1]) == []
        with pytest.raises(InvalidRequest, match="holds no sequence"):
            columns.part(twice, None, None, None)
        columns.take(int(twice[1]))
        with pytest.raises(InvalidRequest, match="holds no sequence"):
            columns.part(twice[1:], None, None, None)


async def test_growth_of_a_step_that_was_refused_as_a_whole_is_told_by_the_next() -> None:
    async with Desk() as desk:
        engine = Engine(desk)
        columns = engine.columns
        slot = columns.add(await engine.open("ab"))
        serve: Callable[..., Any] = desk.ask
        desk.ask = lambda *_, **__: cache_pb2.OperationError(code="QUOTA_EXCEEDED", message="no")  # type: ignore[method-assign]
        with pytest.raises(QuotaExceeded):
            await engine.submit(grow=[slot], publish=([slot], 2))
        with pytest.raises(Conflict, match="under way"):
            columns.take(slot)
        desk.ask = serve  # type: ignore[method-assign]
        assert await engine.submit(grow=[slot], publish=([slot], 2)) == []
        assert columns.blocks[slot] == 4
        engine.same(slot)


async def test_what_launches_may_use_is_given_back_once_they_have_ended() -> None:
    async with Desk(rig_of(windowed(), device=(40, 40))) as desk:
        engine = Engine(desk)
        columns = engine.columns
        slots = [columns.add(await engine.open(prompt)) for prompt in ("abcd", "efgh")]
        launch = engine.lease.launches.begin()
        assert await engine.submit(publish=(slots, 4), recycle=(slots, 16), release=[slots[1]]) == []
        sequences = desk.rig.core.ledger.leases[engine.lease.id].sequences
        assert len(sequences) == 2
        assert columns.tables[1, slots[0], 0] != -1
        engine.lease.launches.complete(launch)
        assert await engine.submit() == []
        assert len(sequences) == 1
        assert columns.tables[1, slots[0], 0] == -1
        engine.same(slots[0])


async def test_a_window_of_a_sequence_that_is_to_end_is_not_taken_from_the_next_one_in_its_slot() -> None:
    async with Desk(rig_of(windowed(), device=(40, 40))) as desk:
        engine = Engine(desk)
        columns, book = engine.columns, engine.book
        slots = [columns.add(await engine.open(prompt)) for prompt in ("abcd", "efgh")]
        following = await engine.open("ijkl")
        launch = engine.lease.launches.begin()
        assert await engine.submit(recycle=(slots, 16)) == []
        release = book.enter(None, columns.part(None, None, None, slots[:1]))
        engine.lease.launches.complete(launch)
        recycle = book.enter(None, columns.part(None, None, None, None))
        answers = [
            desk.ask(desk.cache.step, cache_pb2.StepRequest.FromString(step.sent.SerializeToString()))
            for step in (release, recycle)
        ]
        book.answer(answers[0])
        assert columns.add(following) == slots[0]
        book.answer(answers[1])
        assert (columns.tables[1, slots, 0] == -1).tolist() == [False, True]
        for slot in slots:
            engine.same(slot)


@BOTH
async def test_handles_and_columns_share_a_step(has_columns: bool) -> None:
    async with Desk() as desk:
        engine = Engine(desk, has_columns=has_columns)
        columns = engine.columns
        lent, other = columns.add(await engine.open("ab")), await engine.open("ab")
        third = await engine.open("ef")
        assert engine.lease.stock is not None
        other.record.grow(engine.lease.stock, 1)
        engine.lease.growing[other.record.id] = other.record
        batch = engine.batch()
        batch.publish(other, 2)
        batch.release(third)
        batch.match(chain(*"ab"))
        part = columns.part([lent], ([lent], 2), None, None)
        results = await engine.step(batch, part)
        assert (other.record.blocks, columns.blocks[lent]) == (3, 3)
        assert [type(result).__name__ for result in results] == ["Published", "int", "Handle"]
        (odd,) = part.odd
        assert (odd.slot, odd.result.duplicate_positions) == (lent, (0, 1))
        engine.same(lent)
        desk.rig.check()


async def test_a_batch_travels_in_columns_up_to_the_first_that_none_has() -> None:
    async with Desk() as desk:
        engine = Engine(desk)
        one, two = await engine.open("ab", blocks=3), await engine.open("cd")
        batch = engine.batch()
        batch.publish(one, 2)
        batch.publish(two, 2)
        batch.publish(one, 3, chain(*"abx"))
        batch.recycle(two, 8)
        batch.release(two)
        request = engine.book.enter(batch).sent
        assert len(request.columns.publish_sequences) == 16
        assert [operation.WhichOneof("operation") for operation in request.operations] == [
            "publish",
            "recycle",
            "release",
        ]


async def test_spares_whose_return_was_refused_go_with_a_later_step() -> None:
    async with Desk() as desk:
        engine = Engine(desk)
        columns = engine.columns
        slots = [columns.add(await engine.open("ab")) for _ in range(2)]
        (odd,) = await engine.submit(publish=(slots, 2))
        own = desk.rig.core.ledger.leases[engine.lease.id].sequences[int(columns.ids[odd.slot])].own
        assert len(own[0]) == 2
        serve: Callable[..., Any] = desk.ask
        desk.ask = lambda *_, **__: cache_pb2.OperationError(code="QUOTA_EXCEEDED", message="no")  # type: ignore[method-assign]
        with pytest.raises(QuotaExceeded):
            await engine.submit()
        desk.ask = serve  # type: ignore[method-assign]
        assert await engine.submit() == []
        assert own == [set()]


@BOTH
async def test_a_released_slot_says_what_its_request_put_out(has_columns: bool) -> None:
    async with Desk(rig_of(windowed(), device=(40, 40), eviction="hazard")) as desk:
        engine = Engine(desk, has_columns=has_columns)
        columns = engine.columns
        slots = [columns.add(await engine.open(prompt)) for prompt in ("ab", "cd")]
        columns.output_tokens[slots[1]] = 300
        assert await engine.submit(release=slots) == []
        history = desk.rig.model.blocks.chooser
        assert isinstance(history, History)
        ended = [bool(history.segments.queue_after[parts.own]) for parts in history.remembered]
        assert ended == [False, True]
        assert (columns.output_tokens == -1).all()
