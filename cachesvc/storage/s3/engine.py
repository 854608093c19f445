"""``s3``: host pages to a bucket and back, by threads that wait for its requests.

A get copies what has come into its item's memory only when all of it is here and in time; a put's request has a copy of
the item's memory. So no item is late for longer than its requests' timeouts, and no bytes land in its memory later.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from cachesvc.memory.extents import yield_to_callers
from cachesvc.model.errors import Unavailable
from cachesvc.model.text import one_line
from cachesvc.model.words import KEY_BYTES
from cachesvc.storage.known import KnownObjects
from cachesvc.storage.objects import MAGIC, is_newer
from cachesvc.storage.s3.client import RequestFailed, S3Bucket, S3Options, Trouble
from cachesvc.storage.seam import (
    FORMAT,
    LAYOUT_ID_BYTES,
    WHOLE,
    Caps,
    Check,
    Checked,
    Each,
    Found,
    Item,
    ObjectName,
    Outcome,
    Part,
    Scope,
    Step,
    StorageBackend,
    StoreStatus,
    Totals,
    Troubles,
    no_step,
)
from cachesvc.storage.workers import CLOSE_SECONDS, Job, Workers, jobs_of, nothing
from cachesvc.telemetry import events

ASKERS = 16
"""Questions at a time: as many as one look-up asks."""
REMOVED_AT_ONCE = 1000


class S3Storage(StorageBackend):
    """Storage engine over a bucket. ``clock``: monotonic seconds, for deadlines."""

    kind = "s3"

    def __init__(self, options: S3Options, clock: Callable[[], float] = time.monotonic) -> None:
        self.caps = Caps(is_shared=True, survives="node", evicts_itself=True)
        self._options = options
        self._clock = clock
        self._bucket: S3Bucket | None = None
        self._known = KnownObjects(options.absent, clock)
        self._troubles = Troubles(clock)
        self._stopping, self._list_due = threading.Event(), threading.Event()
        self._problem = ""
        self._is_doubted = self._lists_alone = self._has_lost_bucket = self._has_answered = False
        self._readers = Workers("s3-read", options.readers, nothing, clock)
        self._writers = Workers("s3-write", options.writers, nothing, clock)
        self._askers = Workers("s3-ask", ASKERS, nothing, clock)
        self._removers = Workers("s3-remove", 1, nothing, clock)
        self._lister = threading.Thread(target=self._list_again, name="s3-list", daemon=True)

    def start(self) -> None:
        """Begin; what is there is listed behind it. A store that does not answer costs no start. Raises Unavailable,
        InvalidRequest."""
        self._bucket = S3Bucket(self._options)
        for each in (self._readers, self._writers, self._askers, self._removers):
            each.start()
        self._lister.start()

    def describe(self, scope: Scope, label: str) -> None:
        """Kept in the bucket, for daemons that have no such model."""
        if self._known.describe(scope, label):
            self._writers.add([Job(lambda _: self._describe(scope, label))])

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
        jobs: list[Job[None]] = []
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
        self._writers.add(jobs_of(items, deadline, each, lambda item, _: self._write(item, deadline)))

    def remove(self, names: Sequence[ObjectName]) -> None:
        """Remove objects in the background; look-ups meanwhile miss them."""
        gone = list(names)
        self._known.hide(gone)
        self._removers.add([Job(lambda _: self._remove(gone), partial(self._known.leaving.end, gone))])

    def doubt(self, names: Sequence[ObjectName], check: Check) -> None:
        """Read once more in the background: the bytes may have changed on their way here. Look-ups meanwhile miss."""
        gone = list(names)
        self._known.hide(gone)
        self._removers.add([Job(lambda _: self._look_again(gone, check), partial(self._known.leaving.end, gone))])

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
        self._stopping.set()
        self._list_due.set()
        self._known.leaving.close()
        for each in (self._askers, self._readers, self._writers, self._removers):
            each.close()
        if self._lister.is_alive():
            self._lister.join(CLOSE_SECONDS)

    # -- on threads ----------------------------------------------------------------------------------------------

    def _require(self) -> S3Bucket:
        assert self._bucket is not None, "it was started"
        return self._bucket

    def _suffered(self, error: RequestFailed, kind: str = "read") -> None:
        """Note a failed request: its reason is the problem until one succeeds. No names: operators' status shows it to
        all who may read it."""
        code = f" ({error.code})" if error.code else ""
        self._problem = f"bucket {self._options.bucket}: {error.trouble.value}{code}"
        self._has_lost_bucket |= error.trouble is Trouble.NO_BUCKET
        self._troubles.note(kind, error)

    def _worked(self) -> None:
        """Note that the store has done what it was asked to. A bucket that is there again is listed anew."""
        self._lists_alone |= self._is_doubted
        self._problem, self._is_doubted, self._has_answered = "", False, True
        if self._has_lost_bucket:
            self._has_lost_bucket = False
            self._list_due.set()

    def _ask(self, name: ObjectName) -> bool | None:
        try:
            is_there = name not in self._known.leaving and self._require().has(name.text)
        except RequestFailed as error:
            self._suffered(error)
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
        if item.name in self._known.leaving:
            return Outcome.MISS
        try:
            found = self._require().get(item.name.text, start, length, size_bytes)
        except RequestFailed as error:
            self._suffered(error)
            return Outcome.FAILED
        if found is None:
            return Outcome.MISS
        self._worked()
        if found.size_bytes != size_bytes or len(found.content) != length:
            return Outcome.MISS if self._is_newer(item.name, found.size_bytes) else Outcome.WRONG
        if self._clock() > deadline:
            return Outcome.FAILED  # its wait has ended: what has come is of no use any more
        scatter((item.head, *item.pages), start, found.content)
        return Outcome.OK

    def _end_read(self, index: int, item: Item, each: Each, outcome: Outcome) -> None:
        if outcome is Outcome.OK:
            self._known.add(item.name, len(item.head) + item.payload_bytes, int(time.time()))
        elif outcome is Outcome.MISS:
            self._known.drop(item.name)
        each(index, outcome)

    def _is_newer(self, name: ObjectName, size_bytes: int) -> bool:
        """True where an object of another size is one that a newer release wrote."""
        try:
            first = self._require().get(name.text, 0, len(MAGIC), size_bytes) if size_bytes > len(MAGIC) else None
        except RequestFailed as error:
            self._suffered(error)
            return False
        return first is not None and is_newer(first.content)

    def _look_again(self, names: list[ObjectName], check: Check) -> None:
        try:
            wrong = [name for name in names if self._is_wrong(name, check)]
            self._remove(wrong)
        except RequestFailed as error:
            self._suffered(error)
        finally:
            self._known.leaving.end(names)

    def _is_wrong(self, name: ObjectName, check: Check) -> bool:
        """True where an object that was wrong is so again, or is of an older format. Raises RequestFailed."""
        listed = self._require().size_of(name.text)
        content = None if listed is None else self._require().get(name.text, 0, listed, listed)
        if content is None or is_newer(content.content):
            return False
        if len(content.content) != listed or check(name, content.content) is not Outcome.OK:
            return True
        self._known.add(name, listed, int(time.time()))
        return False

    def _write(self, item: Item, deadline: float) -> Outcome:
        size_bytes = len(item.head) + item.payload_bytes
        if not self._known.leaving.wait_for([item.name], min(deadline - self._clock(), self._options.timeout)):
            return Outcome.BUSY
        if item.name in self._known:
            return Outcome.OK
        if self._options.capacity and self._known.size_bytes + size_bytes > self._options.capacity:
            return Outcome.BUSY
        try:
            self._require().put(item.name.text, gather((item.head, *item.pages)))
        except RequestFailed as error:
            self._suffered(error, "write")
            return Outcome.FAILED
        self._worked()
        self._known.add(item.name, size_bytes, int(time.time()))
        return Outcome.OK

    def _remove(self, names: list[ObjectName]) -> None:
        try:
            for at in range(0, len(names), REMOVED_AT_ONCE):
                self._require().delete([name.text for name in names[at : at + REMOVED_AT_ONCE]])
        except RequestFailed as error:
            self._suffered(error, "write")
        finally:
            self._known.leaving.end(names)

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
            self._suffered(error)
            found.unreadable += 1
            return
        if content is None:
            found.missing += 1
            self._known.drop(name)
            return
        verdict = check(name, content.content) if len(content.content) == size_bytes else Outcome.WRONG
        if not found.note(verdict, size_bytes):
            self._known.hide([name])
            self._look_again([name], check)

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
                self._suffered(error, "list")
                self._is_doubted = not self._lists_alone  # a canary finds out whether anything else works
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
                if name is not None and name not in self._known.leaving:
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


OBJECTS = FORMAT
LABELS = f"{FORMAT}-labels"
MOST_LABEL_BYTES = 256
_SCOPE = rf"([0-9a-f]{{{2 * KEY_BYTES}}})/([0-9a-f]{{{2 * LAYOUT_ID_BYTES}}})"
_OBJECT = re.compile(
    rf"{FORMAT}/{_SCOPE}/([0-9a-f]{{{2 * KEY_BYTES}}})/(w|[0-9]{{1,5}})\.([0-9]{{1,5}})of([0-9]{{1,5}})"
)
_LABEL = re.compile(rf"{LABELS}/{_SCOPE}")


def label_path(scope: Scope) -> str:
    return f"{LABELS}/{scope.text}"


def object_of(path: str) -> ObjectName | None:
    """The object that lies there; None for what is none of ours. Its path is the name's ``text``."""
    found = _OBJECT.fullmatch(path)
    if found is None:
        return None
    group = WHOLE if found[4] == "w" else int(found[4])
    part = Part(group, int(found[5]), int(found[6]))
    scope = Scope(bytes.fromhex(found[1]), bytes.fromhex(found[2]))
    return ObjectName(scope, bytes.fromhex(found[3]), part) if max(part) <= WHOLE else None


def scope_of_label(path: str) -> Scope | None:
    found = _LABEL.fullmatch(path)
    return None if found is None else Scope(bytes.fromhex(found[1]), bytes.fromhex(found[2]))


def ranges(size_bytes: int, part_bytes: int) -> list[tuple[int, int]]:
    """Parts of an object, as (start, length): one where there would be less than two."""
    if size_bytes < 2 * part_bytes:
        return [(0, size_bytes)]
    return [(start, min(part_bytes, size_bytes - start)) for start in range(0, size_bytes, part_bytes)]


def scatter(pieces: Sequence[memoryview], start: int, content: memoryview) -> None:
    """Copy content to the pieces, which lie one after another, from byte ``start`` of them on. Outside of the GIL."""
    at, source = 0, np.frombuffer(content, np.uint8)
    for piece in pieces:
        first, last = max(at, start), min(at + len(piece), start + len(content))
        if first < last:
            np.frombuffer(piece, np.uint8)[first - at : last - at] = source[first - start : last - start]
        at += len(piece)


def gather(pieces: Sequence[memoryview]) -> memoryview:
    """Copy of pieces, one after another. Outside of the GIL."""
    joined = np.empty(sum(map(len, pieces)), np.uint8)
    at = 0
    for piece in pieces:
        joined[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    return joined.data


class Gather:
    """Ends once all parts of an object have ended: by the first outcome that is not OK, if there is one. Any thread."""

    def __init__(self, count: int, end: Callable[[Outcome], None]) -> None:
        self._left = count
        self._outcome = Outcome.OK
        self._end = end
        self._lock = threading.Lock()

    def add(self, outcome: Outcome) -> None:
        with self._lock:
            self._left -= 1
            if self._outcome is Outcome.OK:
                self._outcome = outcome
            is_last = not self._left
        if is_last:
            self._end(self._outcome)


# Number of leading names that are there, by few questions.
#
# A block is of use only with all before it, and is written after them, so presence along a prompt is a step: the first
# name is asked alone, as most prompts have none, then a few at a time between what is there and what is not.

WIDTH = 16
"""Questions asked at a time: 1,024 names take four rounds."""

Answer = Callable[[bool | None], None]
"""Told whether a name is there; None: the question failed."""
Ask = Callable[[int, Answer], None]
"""``(index, answer)``: asks for one name; ``answer`` is called once, on any thread."""


class Search:
    """``found`` is called once, with the number of leading names that are there, or None where a question failed."""

    def __init__(self, count: int, ask: Ask, found: Callable[[int | None], None]) -> None:
        self._ask = ask
        self._found = found
        self._low, self._high = 0, count
        self._answers: dict[int, bool | None] = {}
        self._left = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        if not self._high:
            self._found(0)
            return
        self._round([0])

    def _round(self, indexes: Sequence[int]) -> None:
        self._answers, self._left = {}, len(indexes)
        for index in indexes:
            self._ask(index, lambda is_there, index=index: self._answered(index, is_there))  # type: ignore[misc]

    def _answered(self, index: int, is_there: bool | None) -> None:
        with self._lock:
            self._answers[index] = is_there
            self._left -= 1
            if self._left:
                return
        if None in self._answers.values():
            self._found(None)
            return
        for asked in sorted(self._answers):
            if not self._answers[asked]:
                self._high = asked
                break
            self._low = asked + 1
        if self._low >= self._high:
            self._found(self._low)
            return
        self._round(_spread(self._low, self._high))


def _spread(low: int, high: int) -> list[int]:
    """Up to WIDTH indexes in [low, high), the last of them included."""
    room = high - low
    if room <= WIDTH:
        return list(range(low, high))
    return sorted({low + room * at // WIDTH - 1 for at in range(1, WIDTH + 1)})
