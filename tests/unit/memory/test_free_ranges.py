"""Free bytes of chunks: conserved, never across a border, near a node first; and which of them were ever used."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.memory.host_pool import ALIGN_BYTES, ByteRange, FreeRanges, UsedBytes, columns_of


@settings(max_examples=200, deadline=None)
@given(
    chunks=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    moves=st.lists(st.tuples(st.integers(1, 3 * ALIGN_BYTES), st.integers(0, 8), st.booleans()), max_size=30),
)
def test_free_ranges_conserve_every_byte(chunks: list[int], moves: list[tuple[int, int, bool]]) -> None:
    sizes = [pages * ALIGN_BYTES for pages in chunks]
    free, used = FreeRanges(sizes), UsedBytes()
    held: list[list[tuple[int, ByteRange]]] = []
    dirty: set[tuple[int, int]] = set()
    for page_bytes, pages, gives_back in moves:
        if gives_back and held:
            back = [place for _, place in held.pop(pages % len(held))]
            for place in back:
                dirty |= cells([place])
                used.mark(place)
            free.give_back(columns_of(back))
        else:
            room = free.room(page_bytes)
            taken = free.take(page_bytes, pages)
            assert (taken is not None) == (room >= pages)
            if taken is not None:
                assert sum(count for count, _ in taken) == pages
                assert all(count * page_bytes <= r.size_bytes for count, r in taken)
                held.append(taken)
        places = [place for one in held for _, place in one]
        assert free.free_bytes + sum(place.size_bytes for place in places) == sum(sizes)
        assert len(cells(places)) == sum(place.size_bytes for place in places) // ALIGN_BYTES
        assert all(place.end <= sizes[place.chunk] for place in places)
        assert all(used.overlap(place) == bool(cells([place]) & dirty) for place in places)
    free.give_back(columns_of(place for one in held for _, place in one))
    assert free.room(ALIGN_BYTES) * ALIGN_BYTES == free.free_bytes == sum(sizes)
    assert free.room(max(sizes)) == sizes.count(max(sizes)), "neighbours are one"


def cells(places: list[ByteRange]) -> set[tuple[int, int]]:
    return {(place.chunk, at) for place in places for at in range(place.offset, place.end, ALIGN_BYTES)}


def test_pieces_of_a_node_come_first_and_the_rest_where_there_is_room() -> None:
    host = FreeRanges([ALIGN_BYTES] * 4, [0, 1, 0, 1])
    pieces = host.take(ALIGN_BYTES, 3, node=1)
    assert pieces == [(1, ByteRange(chunk, 0, ALIGN_BYTES)) for chunk in (1, 3, 0)]
    assert host.take(ALIGN_BYTES, 2, node=1) is None
    assert host.take(ALIGN_BYTES, 1, node=7) == [(1, ByteRange(2, 0, ALIGN_BYTES))]


def test_a_copy_is_taken_from_on_its_own() -> None:
    host = FreeRanges([4 * ALIGN_BYTES])
    planned = host.copy()
    pieces = planned.take(ALIGN_BYTES, 3)
    assert (planned.free_bytes, host.free_bytes) == (ALIGN_BYTES, 4 * ALIGN_BYTES)
    planned.give_back(columns_of(place for _, place in pieces or ()))
    assert planned.take(4 * ALIGN_BYTES, 1) == [(1, ByteRange(0, 0, 4 * ALIGN_BYTES))]
