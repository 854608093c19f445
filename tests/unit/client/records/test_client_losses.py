"""Losses of a sequence: all that a load which did not come may have held, and never what came."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cachesvc_client import LoadFailed, LoadOutcome
from cachesvc_client.records.sequence_record import SequenceRecord
from cachesvc_client.wire.messages import parse_tickets
from kvcache.v1 import cache_pb2, common_pb2

from cachesvc.model.layout import Layout, Plane, PlaneGroup
from tests.unit.rigs.client_gpu_rig import GpuRig
from tests.unit.rigs.client_rig import FakeDaemon, cells

LAYERS = 4
LAYOUT = Layout(4, 1, (PlaneGroup("full"),), (Plane("k", 0, "full", (2, 4, 8), "bfloat16"),))
WORD, FAILED = 4, 5


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[GpuRig]:
    daemon = FakeDaemon(tmp_path)
    daemon.start()
    rig = GpuRig(daemon, LAYOUT)
    yield rig
    rig.life.close()
    daemon.close()


def matched(layout: Layout = LAYOUT) -> SequenceRecord:
    """Two blocks in place, three on the host."""
    record = SequenceRecord(1, layout)
    record.open(bytes(32 * 5), 0).apply(cache_pb2.MatchResponse(device_blocks=2, host_blocks=3))
    return record


def ticket(state: int = common_pb2.TICKET_STATE_RUNNING, direction: str = "load") -> common_pb2.Ticket:
    slot = common_pb2.TimelineSlot(word=WORD, failed_word=FAILED, base=10, layers=LAYERS)
    return common_pb2.Ticket(id=1, state=state, reason="broken wire", slot=slot, direction=direction, blocks=3)  # type: ignore[arg-type]


def loading(layout: Layout = LAYOUT) -> SequenceRecord:
    record = matched(layout)
    tables = [cells(0, range(6))]
    record.allocate(6).apply(cache_pb2.AllocateResponse(tables=tables, tickets=[ticket()], loading_blocks=3))
    return record


def test_what_loads_did_not_bring_is_all_that_a_lost_ticket_may_have_held(rig: GpuRig) -> None:
    pool = rig.pool()
    assert not matched().lost_tokens([pool], is_lost=True)
    record = loading()
    assert not record.lost_tokens([pool], is_lost=False)
    assert record.lost_tokens([pool], is_lost=True) == range(8, 20)
    assert record.lost_tokens([], is_lost=True) == range(8, 20)
    assert not record.lost_tokens([], is_lost=False)
    rig.write(WORD, 14)
    assert pool.outcome(record.tickets[0]) is LoadOutcome.CAME
    assert not record.lost_tokens([pool], is_lost=True)
    rig.write(FAILED, 14)
    assert record.lost_tokens([pool], is_lost=False) == range(8, 20)
    pool.close()
    assert not record.lost_tokens([pool], is_lost=False)
    with pytest.raises(LoadFailed):
        record.end_loads(parse_tickets([ticket(common_pb2.TICKET_STATE_FAILED)]))
    assert record.lost_tokens([], is_lost=False) == range(8, 20)


def test_what_came_for_one_of_two_ranks_is_lost_all_the_same(rig: GpuRig) -> None:
    pool, record = rig.pool(), loading(replace(LAYOUT, ranks=2))
    rig.write(WORD, 14)
    assert pool.outcome(record.tickets[0]) is LoadOutcome.CAME
    assert record.lost_tokens([pool], is_lost=True) == range(8, 20)


def test_a_refusal_that_names_a_failed_load_is_one() -> None:
    record = loading()
    record.publish(6, bytes(32 * 6)).end_with(LoadFailed("load 1 failed"))
    assert record.lost_tokens([], is_lost=False) == range(8, 20)


def test_what_is_swapped_out_at_the_loss_is_lost_whole_and_what_came_back_is_not() -> None:
    record = loading()
    record.swap_out().apply(cache_pb2.SwapResponse(tickets=[ticket(direction="store")]))
    assert not record.lost_tokens([], is_lost=False)
    assert record.lost_tokens([], is_lost=True) == range(24)
    record.end_swap(parse_tickets([ticket(common_pb2.TICKET_STATE_DONE, "store")]))
    record.swap_in().apply(cache_pb2.SwapResponse(tickets=[ticket()], tables=[cells(0, range(6))]))
    assert record.lost_tokens([], is_lost=True) == range(24)
    record.end_swap(parse_tickets([ticket(common_pb2.TICKET_STATE_DONE)]))
    assert not record.tickets
    assert not record.lost_tokens([], is_lost=True)


def test_a_swap_that_failed_to_bring_a_sequence_back_has_lost_nothing_yet() -> None:
    record = loading()
    record.swap_out().apply(cache_pb2.SwapResponse(tickets=[ticket(direction="store")]))
    record.end_swap(parse_tickets([ticket(common_pb2.TICKET_STATE_DONE, "store")]))
    record.swap_in().apply(cache_pb2.SwapResponse(tickets=[ticket()], tables=[cells(0, range(6))]))
    with pytest.raises(LoadFailed, match="where it was before"):
        record.end_swap(parse_tickets([ticket(common_pb2.TICKET_STATE_FAILED)]))
    assert not record.lost_tokens([], is_lost=False)
    assert record.lost_tokens([], is_lost=True) == range(24)


def test_a_rank_speaks_for_its_own_bytes_until_the_whole_load_has_failed(rig: GpuRig) -> None:
    """Rank 0's part may be in place before another rank's fails; the daemon tells rank 0 when all ranks have ended."""
    pool = rig.pool()
    (view,) = parse_tickets([ticket()])
    rig.write(WORD, 14)
    pool.confirm(view)
    assert pool.outcome(view) is LoadOutcome.CAME
    rig.write(FAILED, 14)
    assert pool.outcome(view) is LoadOutcome.FAILED
    with pytest.raises(LoadFailed):
        pool.wait_ticket(view, timeout_s=60)
