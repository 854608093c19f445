"""State of a sequence in a client: it follows the daemon's answers, cell by cell, and survives its refusals."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cachesvc_client.core.errors import (
    AlreadyClosed,
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    LeaseLost,
    LoadFailed,
    NotOwned,
    StockEmpty,
)
from cachesvc_client.layouts.families import gqa_windowed
from cachesvc_client.records.entries import Stock, UntoldGrowth
from cachesvc_client.records.sequence_record import BlockTable, SequenceRecord
from cachesvc_client.wire.messages import parse_tickets
from kvcache.v1 import cache_pb2, common_pb2

from cachesvc.model.answers import GroupCells
from cachesvc.wire.convert import pack_numbers, unpack_numbers, unpack_pages
from tests.unit.rigs.client_rig import cells

FULL, WINDOW = 0, 1
LAYOUT = gqa_windowed(
    window_layers=[False, True], kv_heads=1, head_dim=4, block_tokens=4, window_tokens=9, sink_tokens=4
)
KEYS = bytes(range(32)) * 8


def record(*, blocks: int = 4, device_blocks: int = 0) -> SequenceRecord:
    """A sequence of ``blocks`` blocks: pages 0.. in the full group, 100.. in the window."""
    mine = SequenceRecord(1, LAYOUT)
    tables = [cells(FULL, range(device_blocks)), cells(WINDOW, range(100, 100 + device_blocks))]
    mine.open(KEYS, 0).apply(cache_pb2.MatchResponse(device_blocks=device_blocks, tables=tables))
    fresh = range(device_blocks, blocks)
    new = [
        cells(FULL, fresh, first_block=device_blocks),
        cells(WINDOW, [100 + page for page in fresh], first_block=device_blocks),
    ]
    mine.allocate(blocks).apply(cache_pb2.AllocateResponse(tables=new))
    return mine


def tables(mine: SequenceRecord) -> list[list[int]]:
    return [table.pages.tolist() for table in mine.tables]


def test_a_table_grows_beyond_its_first_capacity_and_shows_read_only_views() -> None:
    table = BlockTable()
    assert table.pages.tolist() == []
    table.put(2, range(2))
    assert table.pages.tolist() == [-1, -1, 0, 1], "unwritten cells have no page"
    table.put(0, range(200))
    table.put_at([3, 199], [-1, 7])
    assert table.pages.dtype == np.int32
    assert table.pages[[0, 3, 199]].tolist() == [0, -1, 7]
    with pytest.raises(ValueError, match="read-only"):
        table.pages[0] = 1
    table.put(200, [5])
    assert table.blocks == 201


def test_match_and_allocate_fill_the_tables_of_every_group() -> None:
    mine = record(blocks=3, device_blocks=2)
    assert tables(mine) == [[0, 1, 2], [100, 101, 102]]
    assert mine.sealed_blocks == 2


def test_publish_begins_after_what_was_asked_for_before_even_without_an_answer() -> None:
    mine = record()
    first = mine.publish(2, b"").request
    second = mine.publish(3, b"").request
    assert (first.first_block, first.blocks, first.keys) == (0, 2, b"")
    assert (second.first_block, second.blocks) == (2, 1)
    with pytest.raises(InvalidRequest, match="goes back"):
        mine.publish(2, b"")


def test_publish_sends_keys_only_of_blocks_that_match_was_not_told() -> None:
    mine = record(blocks=10)
    chain = KEYS + b"x" * 32 + b"y" * 32
    mine.publish(8, b"").apply(cache_pb2.PublishResponse(sealed_blocks=8))
    with pytest.raises(InvalidRequest, match="needs the keys of all 10 blocks"):
        mine.publish(10, chain[:-1])
    assert mine.publish(10, chain).request.keys == chain[-64:]


def test_publish_sends_given_keys_so_that_the_daemon_compares_them_with_those_of_match() -> None:
    mine = record(blocks=8)
    assert mine.publish(2, KEYS).request.keys == KEYS[:64]
    assert mine.publish(4, b"").request.keys == b""
    with pytest.raises(InvalidRequest, match="needs the keys of all 6 blocks"):
        mine.publish(6, KEYS[:32])


def test_a_publish_that_stops_early_or_fails_is_asked_again_from_there() -> None:
    mine = record()
    mine.publish(4, b"").apply(cache_pb2.PublishResponse(sealed_blocks=1, pending=True))
    operation = mine.publish(4, b"")
    assert operation.request.first_block == 1
    operation.end_with(NotOwned("no"))
    assert mine.publish(4, b"").request.first_block == 1


def test_duplicates_put_the_sealed_page_into_the_table_and_leave_a_spare_for_recycle() -> None:
    mine = record()
    answer = cache_pb2.PublishResponse(
        sealed_blocks=3,
        duplicate_positions=pack_numbers([0, 2]),
        duplicates=[cells(FULL, [50, 52]), cells(WINDOW, [150, 152])],
        spares=[cells(FULL, [0, 2]), cells(WINDOW, [100, 102])],
    )
    mine.publish(3, b"").apply(answer)
    assert tables(mine) == [[50, 1, 52, 3], [150, 101, 152, 103]]
    refused = mine.recycle(0)
    assert [(g.group, unpack_pages(g.pages).tolist()) for g in refused.request.pages] == [(0, [0, 2]), (1, [100, 102])]
    refused.end_with(NotOwned("no"))
    again = mine.recycle(0)
    assert len(again.request.pages) == 2
    again.apply(cache_pb2.RecycleResponse(recycled_pages=4, cursors=[1]))
    assert list(mine.recycle(0).request.pages) == []


def test_recycle_empties_the_window_behind_its_cursor_and_never_the_sinks() -> None:
    mine = record(blocks=6)
    mine.recycle(20).apply(cache_pb2.RecycleResponse(recycled_pages=2, cursors=[3]))
    assert tables(mine) == [[0, 1, 2, 3, 4, 5], [100, -1, -1, 103, 104, 105]]


def test_growth_goes_out_as_one_entry_with_generations() -> None:
    mine, stock, growing = record(blocks=2), Stock([2, 2]), UntoldGrowth(LAYOUT)
    stock.add([common_cells(0, (7, 8)), common_cells(1, (17, 18))])
    growing.grow(stock, [mine], [1])
    growing.grow(stock, [mine], [1])
    assert tables(mine) == [[0, 1, 7, 8], [100, 101, 17, 18]]
    assert growing.has(mine)
    growth = growing.take()
    message = cache_pb2.StepColumns()
    growth.write(message)
    assert [unpack_pages(group.pages).tolist() for group in message.grow] == [[7, 8], [17, 18]]
    assert [len(group.generations) for group in message.grow] == [8, 8]
    assert unpack_numbers(message.grow_counts) == [2]
    assert not growing.has(mine)
    assert not growing
    growth.take([4], {}, {})
    mine.allocate(5)


def test_a_table_of_another_length_in_the_daemon_ends_the_sequence() -> None:
    mine, stock, growing = record(blocks=2), Stock([1, 1]), UntoldGrowth(LAYOUT)
    stock.add([common_cells(0, (7,)), common_cells(1, (17,))])
    growing.grow(stock, [mine], [1])
    growing.take().take([4], {}, {})
    with pytest.raises(Conflict, match="has 4 blocks in the daemon and 3 here") as refused:
        mine.publish(1, b"")
    assert refused.value.sequence_id == mine.id


def test_sequences_grow_together_or_not_at_all() -> None:
    first, second, stock, growing = record(blocks=2), record(blocks=1), Stock([3, 3]), UntoldGrowth(LAYOUT)
    second.id = 2
    stock.add([common_cells(0, (7, 8, 9)), common_cells(1, (17, 18, 19))])
    for counts in ([1, 3], [1, 0], [1]):
        with pytest.raises((StockEmpty, InvalidRequest)):
            growing.grow(stock, [first, second], counts)
    with pytest.raises(InvalidRequest, match="named twice"):
        growing.grow(stock, [first, first], [1, 1])
    second.failure = LoadFailed("the load broke")
    with pytest.raises(LoadFailed) as refused:
        growing.grow(stock, [first, second], [1, 2])
    assert refused.value.sequence_id == 2
    assert (stock.pages, len(growing), first.blocks) == ((3, 3), 0, 2)
    second.failure = None
    growing.grow(stock, [first, second], [1, 2])
    assert tables(first) == [[0, 1, 7], [100, 101, 17]]
    assert tables(second) == [[0, 8, 9], [100, 18, 19]]
    message = cache_pb2.StepColumns()
    growing.take().write(message)
    assert unpack_numbers(message.grow_counts) == [1, 2]
    assert [unpack_pages(group.pages).tolist() for group in message.grow] == [[7, 8, 9], [17, 18, 19]]


def test_growth_of_a_refused_step_is_told_with_what_came_since() -> None:
    first, second, stock, growing = record(blocks=2), record(blocks=2), Stock([4, 4]), UntoldGrowth(LAYOUT)
    stock.add([common_cells(0, (6, 7, 8, 9)), common_cells(1, (16, 17, 18, 19))])
    growing.grow(stock, [first, second], [1, 1])
    refused = growing.take()
    growing.grow(stock, [first], [1])
    growing.put_back(refused)
    assert growing.has(second)
    told = growing.take()
    assert (told.owners, told.counts, told.uptos) == ([first, second], [2, 1], [4, 3])
    assert [pages.tolist() for pages in told.pages] == [[6, 8, 7], [16, 18, 17]]


@pytest.mark.parametrize("blocks", [1, 2])
def test_growth_has_one_place_in_the_tables_of_all_groups(blocks: int) -> None:
    """The daemon's answer had no cells of the window."""
    mine, stock, growing = SequenceRecord(1, LAYOUT), Stock([2, 2]), UntoldGrowth(LAYOUT)
    mine.allocate(2).apply(cache_pb2.AllocateResponse(tables=[cells(FULL, (0, 1))]))
    stock.add([common_cells(0, (7, 8)), common_cells(1, (17, 18))])
    growing.grow(stock, [mine], [blocks])
    assert tables(mine) == [[0, 1, 7, 8][: 2 + blocks], [-1, -1, 17, 18][: 2 + blocks]]


def test_growth_of_a_sequence_that_ends_is_not_told() -> None:
    first, second, stock, growing = record(blocks=2), record(blocks=2), Stock([3, 3]), UntoldGrowth(LAYOUT)
    stock.add([common_cells(0, (7, 8, 9)), common_cells(1, (17, 18, 19))])
    growing.grow(stock, [first, second], [1, 1])
    growing.grow(stock, [first], [1])
    growing.withdraw([first])
    told = growing.take()
    assert (told.owners, told.counts) == ([second], [1])
    assert [(cells.group, list(cells.pages)) for cells in first.stranded] == [(0, [7]), (1, [17]), (0, [9]), (1, [19])]


def test_a_refused_extend_ends_the_sequence_and_keeps_its_pages_for_the_stock() -> None:
    mine, stock, growing = record(blocks=2), Stock([1, 1]), UntoldGrowth(LAYOUT)
    stock.add([common_cells(0, (7,)), common_cells(1, (17,))])
    growing.grow(stock, [mine], [1])
    growing.take().fail(0, LoadFailed("the load broke"))
    with pytest.raises(LoadFailed, match="the load broke"):
        mine.publish(1, b"")
    mine.release().apply(cache_pb2.ReleaseResponse())
    stock.add(mine.stranded)
    assert stock.pages == (1, 1)


def test_a_short_suffix_is_told_where_there_is_one() -> None:
    mine = record()
    for short in (False, True):
        assert mine.allocate(6, short_suffix=short).request.short_suffix is short
        assert mine.swap_in(short_suffix=short).request.short_suffix is short


def test_growing_over_an_allocate_without_an_answer_is_refused() -> None:
    mine, stock, growing = record(blocks=2), Stock([1, 1]), UntoldGrowth(LAYOUT)
    stock.add([common_cells(0, (7,)), common_cells(1, (17,))])
    allocate = mine.allocate(3)
    with pytest.raises(Conflict, match="allocate without an answer"):
        growing.grow(stock, [mine], [1])
    allocate.end_with(NotOwned("no"))
    growing.grow(stock, [mine], [1])
    assert stock.pages == (0, 0)


def test_a_lost_answer_is_kept_with_its_request_and_a_refusal_is_not() -> None:
    mine = record()
    operation = mine.publish(1, b"")
    operation.end_with(DeadlineExceeded("on the way"))
    assert mine.unanswered is operation
    assert mine.asked_blocks == 1
    other = record()
    other.publish(1, b"").end_with(DeadlineExceeded("the daemon gave up", was_answered=True))
    assert other.unanswered is None
    assert other.asked_blocks == 0


def test_swapped_out_has_no_tables_until_it_is_back_and_a_failed_swap_changes_nothing() -> None:
    mine = record(blocks=2)
    mine.swap_out().apply(cache_pb2.SwapResponse(tickets=[ticket("store")]))
    assert mine.is_swapped_out
    with pytest.raises(LoadFailed, match="where it was before"):
        mine.end_swap(parse_tickets([ticket("store", failed=True)]))
    assert tables(mine)[0] == [0, 1]
    mine.swap_out().apply(cache_pb2.SwapResponse(tickets=[ticket("store")]))
    mine.end_swap(parse_tickets([ticket("store")]))
    back = cache_pb2.SwapResponse(tickets=[ticket("load")], tables=[cells(0, [5, 6]), cells(1, [25, 26])])
    mine.swap_in().apply(back)
    assert tables(mine) == [[5, 6], [25, 26]]
    assert [each.direction for each in mine.tickets] == ["load"]
    with pytest.raises(LoadFailed):
        mine.end_swap(parse_tickets([ticket("load", failed=True)]))
    assert mine.is_swapped_out


def test_spares_end_with_a_swap_out_for_the_daemon_has_freed_them() -> None:
    mine = record(blocks=2)
    mine.give_backs.add_spares([(0, 7)])
    mine.swap_out().apply(cache_pb2.SwapResponse(tickets=[ticket("store")]))
    assert mine.give_backs.take_due() == ([], 0, ())


def test_a_failed_load_makes_every_further_call_say_so_but_release() -> None:
    mine = record(blocks=2)
    with pytest.raises(LoadFailed, match="broken wire"):
        mine.end_loads(parse_tickets([ticket("load", failed=True)]))
    with pytest.raises(LoadFailed, match="broken wire"):
        mine.recycle(1)
    mine.release().apply(cache_pb2.ReleaseResponse(freed_pages=4))


def test_releasing_twice_raises_and_so_does_any_use_after_it() -> None:
    mine = record()
    assert mine.release().apply(cache_pb2.ReleaseResponse(freed_pages=8)) == 8
    for use in (mine.release, lambda: mine.publish(1, b""), lambda: mine.recycle(0)):
        with pytest.raises(AlreadyClosed, match="released"):
            use()


def test_a_release_that_was_refused_ends_the_handle_but_a_late_one_does_not() -> None:
    mine = record()
    mine.release().end_with(DeadlineExceeded("busy", was_answered=True))
    assert not mine.is_released
    mine.release().end_with(LeaseLost("lease-1", "gone"))
    assert mine.is_released


def common_cells(group: int, pages: tuple[int, ...]) -> GroupCells:
    return GroupCells(group, 0, pages, (1,) * len(pages))


def ticket(direction: str, *, failed: bool = False) -> common_pb2.Ticket:
    state = common_pb2.TICKET_STATE_FAILED if failed else common_pb2.TICKET_STATE_DONE
    return common_pb2.Ticket(id=3, state=state, direction=direction, reason="broken wire" if failed else "")


def as_numbers(keys: bytes) -> Any:
    return np.frombuffer(keys, np.uint32).reshape(-1, 8)


@pytest.mark.parametrize("made", [bytes, bytearray, memoryview, as_numbers])
def test_keys_are_taken_in_whatever_holds_them(made: Callable[[bytes], Any]) -> None:
    keys = made(KEYS)
    mine = SequenceRecord(1, LAYOUT)
    assert mine.open(keys, 0).request.keys == KEYS
    mine = record(blocks=8)
    mine.known_keys = 0
    assert mine.publish(3, keys).request.keys == KEYS[: 3 * 32]


def test_what_is_not_bytes_is_no_key() -> None:
    for keys in ("k" * 32, [1, 2, 3], None, np.zeros((4, 64), np.uint8)[:, :32]):
        with pytest.raises(InvalidRequest, match=r"keys are bytes, 32 for each block, such as BlockHasher\.keys"):
            SequenceRecord(1, LAYOUT).open(keys, 0)  # type: ignore[arg-type]
    for tokens in (np.arange(64), np.zeros(16, np.uint32), array("i", [1, 2])):
        with pytest.raises(InvalidRequest, match=r"as tokens are: pass lease\.hasher\(tokens\)\.keys"):
            SequenceRecord(1, LAYOUT).open(tokens, 0)  # type: ignore[arg-type]
