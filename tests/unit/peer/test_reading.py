"""Objects that one call of the kernel's brings: those that came whole count, wherever the stream ends."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import pytest

from cachesvc.peer import reading
from cachesvc.peer.fleet import Loan
from cachesvc.peer.reading import LoanStream
from cachesvc.storage.objects import HEADER_BYTES
from cachesvc.storage.seam import Item
from tests.contracts.storage_rig import name_of
from tests.long_cases import looped

PAGES = (bytes([7]) * 600, bytes([9]) * 400)
OBJECTS = 12
OBJECT_BYTES = reading.ANSWER.size + HEADER_BYTES + sum(map(len, PAGES))


class Played:
    """A stream on which the test sends what it likes. ``came``: objects that were reported."""

    def __init__(self, stack: ExitStack, objects: int = OBJECTS) -> None:
        self._objects = objects
        self.came: list[int] = []
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        loan = Loan(1, 1, bytes(reading.SECRET_BYTES), "127.0.0.1", server.getsockname()[1])
        self.items = [
            Item(name_of(str(at)), memoryview(bytearray(HEADER_BYTES)), tuple(memoryview(bytearray(p)) for p in PAGES))
            for at in range(objects)
        ]
        for item in self.items:
            for page in item.pages:
                page[:] = bytes(len(page))
        self.left = deque((at, item, 2 * at) for at, item in enumerate(self.items))
        self.error: OSError | None = None
        self._reading = LoanStream(loan, self.left, time.monotonic() + 60, self._note)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        self.stream = stack.enter_context(server.accept()[0])
        reading.receive(self.stream, reading.HELLO.size + reading.COUNT.size + 4 * objects, time.monotonic() + 60)

    def answer(self, at: int) -> bytes:
        return (
            reading.ANSWER.pack(2 * at, reading.OK, sum(map(len, PAGES))) + bytes([at]) * HEADER_BYTES + b"".join(PAGES)
        )

    def end(self) -> list[int]:
        """Send nothing more; objects that came, each of which is whole."""
        with suppress(OSError):  # the reader may have closed its end
            self.stream.shutdown(socket.SHUT_WR)
        self._thread.join()
        for at in self.came:
            assert bytes(self.items[at].head) == bytes([at]) * HEADER_BYTES
            assert tuple(map(bytes, self.items[at].pages)) == PAGES
        assert [at for at, _, _ in self.left] == [at for at in range(self._objects) if at not in self.came]
        return self.came

    def _note(self, indexes: Sequence[int]) -> None:
        self.came += indexes

    def _read(self) -> None:
        try:
            self._reading.read()
        except OSError as error:
            self.error = error


def test_all_objects_of_a_stream_come() -> None:
    with ExitStack() as stack:
        played = Played(stack)
        played.stream.sendall(b"".join(map(played.answer, range(OBJECTS))))
        assert played.end() == list(range(OBJECTS))
        assert played.error is None


@pytest.mark.parametrize("beyond", [0, 1, reading.ANSWER.size, reading.ANSWER.size + 1, OBJECT_BYTES - 1])
@looped("whole", range(OBJECTS))
def test_those_that_are_whole_count_wherever_the_stream_ends(whole: int, beyond: int) -> None:
    with ExitStack() as stack:
        played = Played(stack)
        sent = b"".join(map(played.answer, range(OBJECTS)))
        played.stream.sendall(sent[: whole * OBJECT_BYTES + beyond])
        assert played.end() == list(range(whole))
        assert isinstance(played.error, reading.StreamEnded)


@looped("wrong", range(OBJECTS))
def test_what_lies_behind_a_wrong_answer_counts_for_nothing(wrong: int) -> None:
    with ExitStack() as stack:
        played = Played(stack)
        sent = [played.answer(at) for at in range(OBJECTS)]
        sent[wrong] = (
            reading.ANSWER.pack(2 * wrong + 1, reading.OK, sum(map(len, PAGES))) + sent[wrong][reading.ANSWER.size :]
        )
        played.stream.sendall(b"".join(sent))
        assert played.end() == list(range(wrong))
        assert str(played.error) == "the peer answered something else"


def test_however_many_calls_are_quick_the_next_one_is_for_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachesvc.peer.reading.GROUP_BYTES", 1)  # objects are large: each takes a call
    monkeypatch.setattr("cachesvc.peer.reading.QUICK_SECONDS", 60.0)
    with ExitStack() as stack:
        played = Played(stack, 70)
        played.stream.sendall(b"".join(map(played.answer, range(70))))
        assert played.end() == list(range(70))
        assert played.error is None
