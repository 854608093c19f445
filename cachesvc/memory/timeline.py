"""The timeline: 32-bit words in memory files that engines map, a file (a sheet) for each model on each device.

An engine gets the sheet of its model alone: words that other models' engines wait for lie in files that it has no
descriptor of. Processors wait by futex or look; streams wait too, where the file is pinned.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack

from cachesvc.memory.extents import address_of, map_memfd, new_memfd, seal_memfd
from cachesvc.memory.interface import Handle
from cachesvc.model.errors import LedgerBroken, NotFound, Unavailable
from cachesvc.model.futex import WORD_BYTES, store_and_wake, wake, words_of

TIMELINE_WORDS = 8192
"""Words of a sheet."""
# A pipe without writes, by which engines learn that no copy comes into their pools any more.
#
# One end goes to the engines of a model. Movers that copy into the model's slabs on a device hold the other one, and
# close it once their copies have landed; where a mover dies, the kernel closes it.

TOKEN_BYTES = 16


class MappedSheet:
    """One model's words on one device. No other process can write them, because a word says that bytes are there;
    unless engines must (``is_shared``), to end their streams' waits once the daemon is gone."""

    def __init__(self, words: int, *, is_shared: bool = False, fd: int | None = None) -> None:
        """``fd``: of words that another process of the daemon's made, which keeps, seals and gives out their file; else
        they are made here. No other process can write them once ``seal`` was called. Raises OSError."""
        with ExitStack() as undo:
            self._writers = Writers() if fd is None else None
            if self._writers is not None:
                undo.callback(self._writers.close)
            own = new_memfd("kvcache-timeline", words * WORD_BYTES) if fd is None else fd
            if fd is None:
                undo.callback(os.close, own)
            self._view = map_memfd(own, words * WORD_BYTES)
            undo.pop_all()
        self.fd = own if fd is None else None
        self.words = words
        self.handle = Handle("memfd", secrets.token_bytes(TOKEN_BYTES), words * WORD_BYTES)
        self._is_shared = is_shared
        self._is_sealed = False
        self._array = words_of(self._view)

    def seal(self) -> None:
        """Seal the file once its writers have mapped it: it changes neither its size nor its writers. Idempotent."""
        if self.fd is not None and not self._is_sealed:
            seal_memfd(self.fd, is_shared=self._is_shared)
            self._is_sealed = True

    @property
    def writers(self) -> tuple[Handle, int] | None:
        """The pipe that hangs up once nothing copies into the model's slabs on the device any more."""
        return None if self._writers is None or self._writers.fd < 0 else (self._writers.handle, self._writers.fd)

    def hand_over(self, tell: Callable[[int, int], object]) -> None:
        """``tell(words, writers)`` gives both descriptors to another process, which copies in this one's place. Raises
        what that raises."""
        assert self.fd is not None
        assert self._writers is not None
        tell(self.fd, self._writers.held)
        self._writers.hand_over()

    def continue_from(self, other: MappedSheet) -> None:
        """Take over the words of a sheet that is no longer advanced: values only ever move forward."""
        self._array[:] = other._array

    @property
    def address(self) -> int:
        """Address of the first word, in this process."""
        return address_of(self._view)

    def place(self, word: int) -> int:
        return self.address + WORD_BYTES * word

    def read(self, word: int) -> int:
        return int(self._array[word])

    def write(self, word: int, value: int) -> None:
        """Set a word and wake its waiters."""
        store_and_wake(self._array, word, value)

    def wake(self, word: int) -> None:
        """Wake the waiters on a word that a stream has moved: a stream wakes none."""
        wake(self._array, word)

    def close(self) -> None:
        """Close the descriptors; the mapping goes with the last reference to this sheet. Idempotent."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        if self._writers is not None:
            self._writers.close()


MakeSheet = Callable[[int | None], MappedSheet]
"""Makes a sheet, or (of a descriptor) takes over one as ``MappedSheet`` does. Raises OSError, RuntimeError."""


class HostTimeline:
    """One device's words: number ``sheet * words + n`` is the word ``n`` of a sheet, which has ``words`` of them.

    Sheets are opened and closed by one thread at a time, while any other reads and writes words of those that are open.
    """

    def __init__(self, words: int, make: MakeSheet | None = None) -> None:
        """``make``: sheets that are for this process to write alone, unless given."""
        self.words = words
        self._make = make or (lambda fd: MappedSheet(words, fd=fd))
        self._sheets: dict[int, MappedSheet] = {}

    def open(self, number: int, fd: int | None = None) -> None:
        """Make a sheet, sealed, all words 0; or take over one as ``MappedSheet`` does. Raises Unavailable, and
        LedgerBroken where it is open."""
        if number in self._sheets:
            raise LedgerBroken(f"sheet {number} is open already")
        try:
            with ExitStack() as undo:
                sheet = self._make(fd)
                undo.callback(sheet.close)
                sheet.seal()
                undo.pop_all()
        except (OSError, RuntimeError) as error:
            raise Unavailable(
                f"no memory for the words that a model's engines wait for: {error}; see ulimit -n and ulimit -l"
            ) from error
        self._sheets[number] = sheet

    def put(self, number: int, sheet: MappedSheet) -> None:
        """A sheet in place of the one that is closed here, or the first."""
        before = self._sheets.get(number)
        self._sheets[number] = sheet
        if before is not None:
            before.close()

    def sheet(self, number: int) -> MappedSheet:
        found = self._sheets.get(number)
        if found is None:
            raise NotFound("sheet", number)
        return found

    def sheets(self) -> dict[int, MappedSheet]:
        return dict(self._sheets)

    def close_sheet(self, number: int) -> None:
        """Close a sheet: its words are neither written nor followed any more, and its number never comes again for
        other ones. No-op where it is not open."""
        sheet = self._sheets.pop(number, None)
        if sheet is not None:
            sheet.close()

    def place(self, word: int) -> int:
        number, at = divmod(word, self.words)
        return self._sheets[number].place(at)

    def read(self, word: int) -> int:
        number, at = divmod(word, self.words)
        return self._sheets[number].read(at)

    def write(self, word: int, value: int) -> None:
        """Set a word and wake its waiters."""
        number, at = divmod(word, self.words)
        self._sheets[number].write(at, value)

    def wake(self, word: int) -> None:
        """Wake the waiters on a word that a stream has moved: a stream wakes none."""
        number, at = divmod(word, self.words)
        self._sheets[number].wake(at)

    def close(self) -> None:
        """Close every sheet; their words can still be read. Idempotent."""
        with ExitStack() as every:  # whatever one of them raises
            for sheet in self._sheets.values():
                every.callback(sheet.close)


class Writers:
    """``fd``: for engines, by ``handle``; it hangs up once ``held`` is closed in every process."""

    def __init__(self) -> None:
        """Raises OSError."""
        self.handle = Handle("pipe", secrets.token_bytes(TOKEN_BYTES), 0)
        self.fd, self.held = os.pipe2(os.O_CLOEXEC)

    def hand_over(self) -> None:
        """Another process holds the other end now, and this one does not. Idempotent."""
        if self.held >= 0:
            os.close(self.held)
            self.held = -1

    def close(self) -> None:
        self.hand_over()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
