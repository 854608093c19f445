"""Records come through a ring whole and in order, around its end, in pieces, and however full it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.model.futex import Words, store
from cachesvc.mover.records import HEAD_BYTES, READ, WRITTEN, Reader, Ring, Writer


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring.make("ring", HEAD_BYTES)
    yield made
    made.close()


def take(reader: Reader, count: int) -> list[bytes]:
    """The next ``count`` records, waited for."""
    found: list[bytes] = []
    while len(found) < count:
        reader.wait()
        found += reader.take()
    return found


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 3 * HEAD_BYTES), max_size=30), seed=st.integers(0, 1 << 32))
def test_records_of_any_size_come_whole_and_in_order(sizes: list[int], seed: int) -> None:
    """Among them such as are larger than the whole ring: the reader frees it piece by piece."""
    ring = Ring.make("ring", HEAD_BYTES)
    rng = np.random.default_rng(seed)
    contents = [rng.bytes(size) for size in sizes]
    writer, reader = Writer(ring), Reader(ring)
    for content in contents:
        writer.put([content])
    assert take(reader, len(contents)) == contents
    assert reader.take() == []
    ring.close()


def test_parts_of_a_record_lie_one_after_another(ring: Ring) -> None:
    Writer(ring).put([np.array([1, 2], np.int64), b"abc", np.array([3], np.int64)])
    (record,) = take(Reader(ring), 1)
    assert record == bytes([1, *[0] * 7, 2, *[0] * 7]) + b"abc" + bytes([3, *[0] * 7])


def test_many_writers_lose_nothing(ring: Ring) -> None:
    writer, each = Writer(ring), 200

    def write(number: int) -> None:
        for count in range(each):
            writer.put([np.array([number, count], np.int64), bytes(number * 7)])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    found = take(Reader(ring), 4 * each)
    for thread in threads:
        thread.join()
    for number in range(4):
        mine = [record for record in found if record[0] == number]
        assert [int.from_bytes(record[8:16], "little") for record in mine] == list(range(each))
        assert {len(record) for record in mine} == {16 + number * 7}


def test_who_comes_later_goes_on_where_the_words_stand(ring: Ring) -> None:
    """The daemon writes the last record of a mover that has died behind what that one wrote."""
    Writer(ring).put([b"first"])
    reader = Reader(ring)
    assert take(reader, 1) == [b"first"]
    Writer(ring).put([b"second"])
    Writer(ring).put([b"third"])
    assert take(reader, 2) == [b"second", b"third"]


def test_a_closed_writer_writes_no_more_and_waits_for_nobody(ring: Ring) -> None:
    writer = Writer(ring)
    for _ in range(3):
        writer.put([bytes(HEAD_BYTES // 2)])
    writer.close()
    writer.close()
    writer.put([b"late"])
    found = Reader(ring).take()
    assert all(record == bytes(HEAD_BYTES // 2) for record in found)
    assert len(found) < 3


def test_a_reader_that_is_stopped_waits_no_more_for_the_rest_of_a_record(ring: Ring) -> None:
    """Its writer has died, perhaps."""
    Writer(ring).put([bytes(2 * HEAD_BYTES)])
    reader, went_on = Reader(ring), list[bool]()
    assert reader.wait()
    thread = threading.Thread(target=lambda: went_on.append(reader.wait()))
    assert reader.take() == []
    reader.stop()
    thread.start()
    thread.join()
    assert went_on == [False]


def test_closing_a_writer_leaves_the_readers_word_alone(ring: Ring) -> None:
    """It may come further just then, and no other thread would set it right."""
    writer, reader = Writer(ring), Reader(ring)
    ring.words.flags.writeable = False
    writer.close()
    ring.words.flags.writeable = True
    assert reader.take() == []


def test_a_record_that_wakes_no_reader_comes_with_the_next_one_or_by_itself_and_a_full_ring_is_emptied(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader, woken = Writer(ring), Reader(ring), list[int]()
    monkeypatch.setattr("cachesvc.mover.records.store_and_wake", lambda *stored: woken.append(stored[1]))
    writer.put([b"began"], wakes=False)
    assert woken == []
    monkeypatch.undo()
    assert take(reader, 1) == [b"began"], "a reader that sleeps looks by itself"
    writer.put([b"began again"], wakes=False)
    writer.put([b"ended"])
    assert take(reader, 2) == [b"began again", b"ended"]
    contents = [bytes([number]) * 1000 for number in range(20)]
    for content in contents:
        writer.put([content], wakes=False)
    assert take(reader, 20) == contents


def test_a_record_that_wakes_takes_its_wake_along_where_one_that_does_not_finds_room_for_both(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader, woken = Writer(ring), Reader(ring), list[int]()

    def note(words: Words, index: int, value: int) -> None:
        woken.append(index)
        store(words, index, value)

    monkeypatch.setattr("cachesvc.mover.records.LOOK_S", 3600.0)  # the thread that waits for room sleeps
    contents = [bytes([number]) * 900 for number in range(5)]
    for content in contents:  # the last one finds no room
        writer.put([content])
    found = reader.take()
    monkeypatch.setattr("cachesvc.mover.records.store_and_wake", note)
    store(ring.words, READ, ring.mark(WRITTEN))
    writer.put([b"began"], wakes=False)
    assert WRITTEN in woken
    assert found + reader.take() == [*contents, b"began"]
    assert len(found) == 4
    writer.close()
