"""The Mooncake engine over a library with scripted answers: every call has an end, and no memory is given back
that bytes may still come to. The real library: tests/contracts/test_mooncake_faults.py."""

from __future__ import annotations

import mmap
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest

from cachesvc.storage.mooncake import native
from cachesvc.storage.mooncake.engine import MooncakeStorage
from cachesvc.storage.mooncake.native import MooncakeOptions
from cachesvc.storage.objects import HEADER_BYTES
from cachesvc.storage.seam import Item, Outcome
from tests.contracts.storage_rig import PAGE_BYTES, name_of

DOUBT_SECONDS = 0.05


class SaidLibrary:
    """Connects, and says ``code`` to every read; ``raises`` instead, once. ``heads``: where headers were to come to."""

    def __init__(self) -> None:
        self.code = native.TRANSFER_FAILED
        self.raises: Exception | None = None
        self.setup_raises: Exception | None = None
        self.heads: list[int] = []
        self.MooncakeDistributedStore = lambda: self
        self.ReplicateConfig = SimpleNamespace

    def setup(self, *_: object) -> int:
        if (error := self.setup_raises) is not None:
            self.setup_raises = None
            raise error
        return native.OK

    def register_buffer(self, address: int, size_bytes: int) -> int:
        return native.OK if address and size_bytes else native.INVALID

    def batch_is_exist(self, names: list[str]) -> list[int]:
        self._raise()
        return [1] * len(names)

    def batch_get_into_multi_buffers(
        self, names: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        self.heads += [first for first, *_ in addresses]
        self._raise()
        return [self.code] * len(names)

    def get_size(self, name: str) -> int:
        return HEADER_BYTES + PAGE_BYTES if name else native.NOT_FOUND

    def close(self) -> int:
        return native.OK

    def _raise(self) -> None:
        if (error := self.raises) is not None:
            self.raises = None
            raise error


class Asking:
    """An engine over a library, and what it says."""

    def __init__(self, library: SaidLibrary, port: int) -> None:
        self.library = library
        self.told: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        options = MooncakeOptions(f"127.0.0.1:{port}", readers=1, writers=1)
        self.engine = MooncakeStorage(options, lambda: library, lambda _: None, DOUBT_SECONDS)
        self.page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        self.engine.register(self.page)

    def read(self) -> None:
        item = Item(name_of("a"), memoryview(bytearray(HEADER_BYTES)), (self.page,))
        self.engine.get([item], time.monotonic() + 1e6, lambda _, outcome: self.told.put(outcome))

    def exists(self) -> Sequence[bool]:
        answers: queue.SimpleQueue[Sequence[bool] | None] = queue.SimpleQueue()
        self.engine.exists([name_of("a")], time.monotonic() + 1e6, answers.put)
        answer = answers.get()
        assert answer is not None
        return answer


@pytest.fixture
def begin() -> Iterator[Callable[[SaidLibrary], Asking]]:
    made: list[Asking] = []
    with socket.create_server(("127.0.0.1", 0)) as master:

        def start(library: SaidLibrary) -> Asking:
            made.append(Asking(library, master.getsockname()[1]))
            made[-1].engine.start()
            return made[-1]

        yield start
        for each in made:
            each.engine.close()


def connected(asking: Asking) -> Asking:
    """Until it has found its master."""
    while not asking.exists()[0]:
        threading.Event().wait(0.01)
    return asking


def test_a_question_that_breaks_is_answered_with_nothing(begin: Callable[[SaidLibrary], Asking]) -> None:
    asking = connected(begin(SaidLibrary()))
    asking.library.raises = RuntimeError("the library broke")
    assert asking.exists() == [False]
    assert asking.exists() == [True]


@pytest.mark.parametrize("breaks", [False, True])
def test_a_read_that_fails_on_its_way_keeps_its_memory_for_a_while(
    begin: Callable[[SaidLibrary], Asking], *, breaks: bool
) -> None:
    asking = connected(begin(SaidLibrary()))
    asking.library.raises = RuntimeError("the library broke") if breaks else None
    began = time.monotonic()
    asking.read()
    assert asking.told.get() is Outcome.LATE, "the wait has ended"
    assert asking.told.get() is Outcome.BUSY
    assert time.monotonic() - began >= DOUBT_SECONDS, "its memory is free only now"
    asking.library.code = native.NOT_FOUND
    asking.read()
    assert asking.told.get() is Outcome.MISS
    first, second = asking.library.heads
    assert first != second, "nor is the thread's own memory used meanwhile"


def test_a_client_that_cannot_be_made_is_made_later(begin: Callable[[SaidLibrary], Asking]) -> None:
    library = SaidLibrary()
    library.setup_raises = RuntimeError("no shared memory left")
    connected(begin(library))
    assert library.setup_raises is None
