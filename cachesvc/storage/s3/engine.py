"""``s3``: host pages to a bucket and back, by threads that wait for its requests.

A get copies what has come into its item's memory only when all of it is here and in time; a put's request has a copy of
the item's memory. So no item is late for longer than its requests' timeouts, and no bytes land in its memory later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from cachesvc.memory.mapped import yield_to_callers
from cachesvc.model.errors import Unavailable
from cachesvc.model.text.printable import one_line
from cachesvc.storage.file.lane import CLOSE_SECONDS, Job, Lane
from cachesvc.storage.s3.client import RequestFailed, S3Bucket, Trouble
from cachesvc.storage.s3.known import KnownObjects
from cachesvc.storage.s3.names import LABELS, MOST_LABEL_BYTES, OBJECTS, label_path, object_of, scope_of_label
from cachesvc.storage.s3.options import S3Options
from cachesvc.storage.s3.pieces import Gather, gather, ranges, scatter
from cachesvc.storage.s3.search import Search
from cachesvc.storage.seam import (
    Caps,
    Check,
    Checked,
    Chooser,
    Each,
    Found,
    Gone,
    Item,
    ObjectName,
    Outcome,
    Part,
    Scope,
    Step,
    StoreStatus,
    Totals,
    Use,
    no_step,
)
from cachesvc.storage.troubles import Troubles
from cachesvc.telemetry import events

ASKERS = 16
"""Questions at a time: as many as one look-up asks."""
REMOVED_AT_ONCE = 1000


class S3Storage:
    """Storage engine over a bucket. ``clock``: monotonic seconds, for deadlines."""

    kind = "s3"

    def __init__(self, options: S3Options, clock: Callable[[], float] = time.monotonic) -> None:
        self.caps = Caps(is_shared=True, survives="node", evicts_itself=True)
        self._options = options
        self._clock = clock
        self._bucket: S3Bucket | None = None
        self._known = KnownObjects(options.absent, clock)
        self._troubles = Troubles(clock)
        self._leaving: set[ObjectName] = set()
        self._left = threading.Condition()
        self._stopping, self._list_due = threading.Event(), threading.Event()
        self._problem = ""
        self._is_doubted = self._lists_alone = self._has_lost_bucket = self._has_answered = False
        self._readers = Lane("s3-read", options.readers, clock)
        self._writers = Lane("s3-write", options.writers, clock)
        self._askers = Lane("s3-ask", ASKERS, clock)
        self._removers = Lane("s3-remove", 1, clock)
        self._lister = threading.Thread(target=self._list_again, name="s3-list", daemon=True)

    def start(self) -> None:
        """Begin; what is there is listed behind it. A store that does not answer costs no start. Raises Unavailable,
        InvalidRequest."""
        self._bucket = S3Bucket(self._options)
        for lane in (self._readers, self._writers, self._askers, self._removers):
            lane.start()
        self._lister.start()

    def register(self, chunk: memoryview) -> None:
        """No-op: any memory will do."""

    def describe(self, scope: Scope, label: str) -> None:
        """Kept in the bucket, for daemons that have no such model."""
        if self._known.describe(scope, label):
            self._writers.add([Job(lambda _: self._describe(scope, label), _nothing, float("inf"))])

    def watch(self, gone: Gone) -> None:
        """Do nothing: the store does not report what its rules delete."""

    def used(self, scope: Scope, uses: Sequence[Use], chooser: Chooser | None) -> None:
        """No-op: the bucket's rules delete."""

    def expects(self, scope: Scope, keys: bytes, parts: Sequence[Part]) -> int | None:
        """Expect what is known; None where the store must be asked."""
        return self._known.expects(scope, keys, parts)

    def exists(self, names: Sequence[ObjectName], deadline: float, found: Found) -> None:
        """Ask for some of the names: those behind one that is absent count as absent too."""
        asked = list(names)

        def ask(index: int, answer: Callable[[bool | None], None]) -> None:
            self._askers.add([Job(lambda _: answer(self._ask(asked[index])), partial(answer, None), deadline)])

        def end(count: int | None) -> None:
            found(None if count is None else [at < count for at in range(len(asked))])

        Search(len(asked), ask, end).begin()

    def get(self, items: Sequence[Item], deadline: float, each: Each) -> None:
        """Read in the order of ``items``; a large one by several requests."""
        jobs: list[Job] = []
        for index, item in enumerate(items):
            spans = ranges(len(item.head) + item.payload_bytes, self._options.part)
            whole = Gather(len(spans), partial(self._end_read, index, item, each))
            jobs += [
                Job(lambda _, item=item, span=span, whole=whole: whole.add(self._read(item, span, deadline)),  # type: ignore[misc]
                    partial(whole.add, Outcome.BUSY), deadline)
                for span in spans
            ]  # fmt: skip
        self._readers.add(jobs)

    def put(self, items: Sequence[Item], deadline: float, each: Each) -> None:
        """Write in the order of ``items``."""
        self._writers.add(
            [
                Job(lambda _, index=index, item=item: each(index, self._write(item, deadline)),  # type: ignore[misc]
                    partial(each, index, Outcome.BUSY), deadline)
                for index, item in enumerate(items)
            ]
        )  # fmt: skip

    def remove(self, names: Sequence[ObjectName]) -> None:
        """Remove objects in the background; look-ups meanwhile miss them."""
        gone = list(names)
        self._hide(gone)
        self._removers.add([Job(lambda _: self._remove(gone), partial(self._forget, gone), float("inf"))])

    def purge(self, scope: Scope | None, step: Step = no_step) -> int:
        """Purge all daemons' objects, as the store lists them. Raises Unavailable."""
        folder = OBJECTS if scope is None else f"{OBJECTS}/{scope.text}"
        count = 0
        try:
            for some in self._require().list(folder):
                paths = [listed.path for listed in some if object_of(listed.path) is not None]
                if paths:
                    self._require().delete(paths)
                step()
                count += len(paths)
        except RequestFailed as error:
            raise Unavailable(f"storage: {count} objects were removed, and then {error}; try again") from error
        self._known.forget(scope)
        return count

    def status(self) -> StoreStatus:
        """Objects that this daemon knows of, others' among them as of the last listing."""
        status = self._known.status(int(time.time()))
        status.capacity_bytes = self._options.capacity
        status.problem = self._problem
        status.errors, status.last_error = self._troubles.count, self._troubles.last
        return status

    def totals(self) -> Totals:
        """Totals of the objects in ``status``."""
        return Totals(
            len(self._known),
            self._known.size_bytes,
            self._options.capacity,
            0,
            self._problem,
            not self._is_doubted,
            has_answered=self._has_answered,
        )

    def check_all(self, check: Check, step: Step = no_step) -> Checked:
        """Check every object that the store lists, others' included. Raises Unavailable."""
        found = Checked()
        try:
            for some in self._require().list(OBJECTS):
                for listed in some:
                    name = object_of(listed.path)
                    step()
                    if name is not None:
                        self._check_one(name, listed.size_bytes, check, found)
        except RequestFailed as error:
            raise Unavailable(f"storage: the bucket cannot be listed: {error}; try again") from error
        return found

    def close(self) -> None:
        """Requests under way are left behind."""
        self._stopping.set()
        self._list_due.set()
        with self._left:
            self._left.notify_all()
        for lane in (self._askers, self._readers, self._writers, self._removers):
            lane.close()
        if self._lister.is_alive():
            self._lister.join(CLOSE_SECONDS)

    # -- on threads ----------------------------------------------------------------------------------------------

    def _require(self) -> S3Bucket:
        assert self._bucket is not None, "it was started"
        return self._bucket

    def _suffered(self, error: RequestFailed) -> None:
        """A request has failed: for what reason is shown until one succeeds. No names: operators' status shows it to
        all who may read it."""
        code = f" ({error.code})" if error.code else ""
        self._problem = f"bucket {self._options.bucket}: {error.trouble.value}{code}"
        self._has_lost_bucket |= error.trouble is Trouble.NO_BUCKET

    def _worked(self) -> None:
        """The store has done what it was asked to. A bucket that is there again is listed: it is not what it was."""
        self._lists_alone |= self._is_doubted
        self._problem, self._is_doubted, self._has_answered = "", False, True
        if self._has_lost_bucket:
            self._has_lost_bucket = False
            self._list_due.set()

    def _note_unread(self, error: RequestFailed) -> None:
        self._suffered(error)
        if objects := self._troubles.note("read", str(error)):
            events.event("storage_read_failed", reason=str(error), objects=objects)

    def _note_unwritten(self, error: RequestFailed) -> None:
        self._suffered(error)
        if objects := self._troubles.note("write", str(error)):
            events.event("storage_write_failed", reason=str(error), objects=objects)

    def _ask(self, name: ObjectName) -> bool | None:
        try:
            is_there = name not in self._leaving and self._require().has(name.text)
        except RequestFailed as error:
            self._note_unread(error)
            return None
        if is_there:
            self._worked()
        else:
            self._known.drop(name)
        return is_there

    def _read(self, item: Item, span: tuple[int, int], deadline: float) -> Outcome:
        """Read a part of an object. It answers for it once, whatever comes."""
        start, length = span
        size_bytes = len(item.head) + item.payload_bytes
        if item.name in self._leaving:
            return Outcome.MISS
        try:
            found = self._require().get(item.name.text, start, length, size_bytes)
        except RequestFailed as error:
            self._note_unread(error)
            return Outcome.FAILED
        if found is None:
            return Outcome.MISS
        self._worked()
        if found.size_bytes != size_bytes or len(found.content) != length:
            return Outcome.WRONG
        if self._clock() > deadline:
            return Outcome.FAILED  # its wait has ended: what has come is of no use any more
        scatter((item.head, *item.pages), start, found.content)
        return Outcome.OK

    def _end_read(self, index: int, item: Item, each: Each, outcome: Outcome) -> None:
        if outcome is Outcome.OK:
            self._known.add(item.name, len(item.head) + item.payload_bytes, int(time.time()))
        elif outcome is Outcome.MISS:
            self._known.drop(item.name)
        elif outcome is Outcome.WRONG:
            self.remove([item.name])
        each(index, outcome)

    def _write(self, item: Item, deadline: float) -> Outcome:
        size_bytes = len(item.head) + item.payload_bytes
        if not self._is_free(item.name, deadline):
            return Outcome.BUSY
        if item.name in self._known:
            return Outcome.OK
        if self._options.capacity and self._known.size_bytes + size_bytes > self._options.capacity:
            return Outcome.BUSY
        try:
            self._require().put(item.name.text, gather((item.head, *item.pages)))
        except RequestFailed as error:
            self._note_unwritten(error)
            return Outcome.FAILED
        self._worked()
        self._known.add(item.name, size_bytes, int(time.time()))
        return Outcome.OK

    def _is_free(self, name: ObjectName, deadline: float) -> bool:
        """Wait until the removal of an object of this name is done; False where it is not in time."""
        with self._left:
            while name in self._leaving and not self._stopping.is_set():
                left = min(deadline, self._clock() + self._options.timeout) - self._clock()
                if left <= 0 or not self._left.wait(min(left, threading.TIMEOUT_MAX)):
                    return False
            return name not in self._leaving

    def _hide(self, names: list[ObjectName]) -> None:
        with self._left:
            self._leaving.update(names)
        for name in names:
            self._known.drop(name)

    def _remove(self, names: list[ObjectName]) -> None:
        try:
            for at in range(0, len(names), REMOVED_AT_ONCE):
                self._require().delete([name.text for name in names[at : at + REMOVED_AT_ONCE]])
        except RequestFailed as error:
            self._note_unwritten(error)
        finally:
            self._forget(names)

    def _forget(self, names: list[ObjectName]) -> None:
        with self._left:
            self._leaving.difference_update(names)
            self._left.notify_all()

    def _describe(self, scope: Scope, label: str) -> None:
        text = label.encode()[:MOST_LABEL_BYTES]
        path = label_path(scope)
        try:
            self._require().delete([path])
            self._require().put(path, text)
        except RequestFailed as error:
            events.warning("storage_label_not_kept", reason=str(error))

    def _check_one(self, name: ObjectName, size_bytes: int, check: Check, found: Checked) -> None:
        try:
            content = self._require().get(name.text, 0, size_bytes, size_bytes)
        except RequestFailed as error:
            self._note_unread(error)
            found.unreadable += 1
            return
        if content is None:
            found.missing += 1
            self._known.drop(name)
            return
        found.objects += 1
        found.size_bytes += size_bytes
        if len(content.content) != size_bytes or not check(name, content.content):
            found.wrong += 1
            self._hide([name])
            self._remove([name])

    # -- the lister ------------------------------------------------------------------------------------------------

    def _list_again(self) -> None:
        """Root of the thread that lists the bucket, at the start and again and again."""
        yield_to_callers()
        while not self._stopping.is_set():
            try:
                self._list()
                self._is_doubted = self._lists_alone = False
                self._worked()
                pause = self._options.rescan
            except RequestFailed as error:
                self._suffered(error)
                self._is_doubted = not self._lists_alone  # a canary finds out whether anything else works
                if objects := self._troubles.note("list", str(error)):
                    events.event("storage_not_listed", reason=str(error), objects=objects)
                pause = min(60.0, self._options.rescan)
            except Exception:  # noqa: BLE001 - the root of a thread: the next round may be better
                events.failure("storage_scan_broke")
                pause = self._options.rescan
            self._list_due.wait(pause)
            self._list_due.clear()

    def _list(self) -> None:
        """List all objects, and the labels of scopes that no model here has. Raises RequestFailed."""
        number = self._known.begin_listing()
        for some in self._require().list(OBJECTS):
            for listed in some:
                name = object_of(listed.path)
                if name is not None and name not in self._leaving:
                    self._known.add(name, listed.size_bytes, listed.modified)
            if self._stopping.is_set():
                return
        self._known.end_listing(number)
        unlabelled = set(self._known.unlabelled())
        for some in self._require().list(LABELS):
            for listed in some:
                scope = scope_of_label(listed.path)
                if scope in unlabelled and listed.size_bytes <= MOST_LABEL_BYTES:
                    self._read_label(scope, listed.path, listed.size_bytes)

    def _read_label(self, scope: Scope, path: str, size_bytes: int) -> None:
        found = self._require().get(path, 0, size_bytes, size_bytes)
        if found is not None:
            self._known.describe(scope, one_line(bytes(found.content).decode(errors="replace")))


def _nothing() -> None:
    """Do nothing: there is no waiter."""
