"""Logs are events: a name of the vocabulary and its fields, one JSON object a line on standard error.

Within a traced call a line carries ``trace_id`` and ``span_id``. Nothing here waits or raises: ``LineWriter``.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import select
import time
from collections import Counter
from collections.abc import Callable, Hashable

from cachesvc.telemetry.tracing import current_span
from cachesvc.telemetry.vocabulary import VOCABULARY

STANDARD_ERROR = 2
CHATTY = "grpc._cython.cygrpc"
"""Says at level debug with each call that there is an event loop: nothing else would be found among its lines."""
_log = logging.getLogger("cachesvc")
_TEMPLATE = re.compile(r"([a-z][a-z0-9_]*)((?: [a-z_]+=%[-.\d]*[a-z])*)")
"""Pattern of a log call of lower floors: ``logging``'s message is an event's name and its fields."""


class JsonLines(logging.Formatter):
    """``{"time": ..., "level": ..., "event": ..., fields...}``"""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {"time": f"{when}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        line |= _said(record)
        span = current_span.get()
        if span is not None:
            line |= {"trace_id": span.trace_id, "span_id": span.span_id}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _said(record: logging.LogRecord) -> dict[str, object]:
    """The event's name and fields; a library's own words become ``library_log``."""
    fields = getattr(record, "fields", None)
    if fields is not None:
        return {"event": record.getMessage(), **fields}
    found = _TEMPLATE.fullmatch(str(record.msg))
    if found is None or not record.name.startswith(("cachesvc", "gpu_ops")):
        return {"event": "library_log", "logger": record.name, "text": record.getMessage()}
    names = re.findall(r" ([a-z_]+)=", found[2])
    values = record.args if isinstance(record.args, tuple) else ()
    return {"event": found[1], **dict(zip(names, values, strict=False))}


class _Handler(logging.Handler):
    """Lines to standard error, and how many were lost once it takes lines again."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self.setFormatter(JsonLines())
        self.writer = writer
        self._told = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - an unwritable event must not break its caller
            self.writer.lost += 1
            return
        if self.writer.lost > self._told:
            lost = self.writer.lost
            note = {"level": "warning", "event": "log_lines_lost", "lines": lost - self._told}
            if self.writer.write(json.dumps(note)):
                self._told = lost
            else:
                self._told += 1  # the note itself is no loss
        self.writer.write(line)


def start_logging(level: str) -> None:
    """Write events of ``level`` and above to standard error."""
    keep_standard_descriptors()
    root = logging.getLogger()
    root.handlers[:] = [_Handler(LineWriter(STANDARD_ERROR))]
    root.setLevel(level.upper())
    logging.getLogger(CHATTY).setLevel(max(root.level, logging.INFO))


def lost_lines() -> int:
    """Lines that could not be written so far."""
    return sum(handler.writer.lost for handler in logging.getLogger().handlers if isinstance(handler, _Handler))


class LineLimits:
    """Limit for lines that callers can cause as often as they connect: ``ONE_A_MINUTE`` of one event for each of them,
    and ``ALL_A_MINUTE`` of it for all. What is left out is counted in the next line of that event."""

    ONE_A_MINUTE, ALL_A_MINUTE = 10, 60

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._minute = -1
        self._of_one: Counter[tuple[str, Hashable]] = Counter()
        self._of_all: Counter[str] = Counter()
        self._unlogged: Counter[str] = Counter()

    def admit(self, name: str, who: Hashable) -> int | None:
        """Number of lines of this event that were left out since the last one, for a line that is to be written; None
        for one that is not. ``who``: the process or user that causes it, however often it reconnects."""
        if (minute := int(self._clock() // 60)) != self._minute:
            self._minute = minute
            self._of_one.clear()
            self._of_all.clear()
        if self._of_one[name, who] >= self.ONE_A_MINUTE or self._of_all[name] >= self.ALL_A_MINUTE:
            self._unlogged[name] += 1
            return None
        self._of_one[name, who] += 1
        self._of_all[name] += 1
        return self._unlogged.pop(name, 0)


_limits = LineLimits()
"""Limits of this process's log."""


def event(name: str, **fields: object) -> None:
    _log.info(name, extra={"fields": fields})


def warning(name: str, **fields: object) -> None:
    """Log an event that should be rare."""
    _log.warning(name, extra={"fields": fields})


def limited(name: str, by: Hashable, **fields: object) -> None:
    """Log an event that callers can cause, within ``LineLimits``. ``by``: the process or user that causes it."""
    if (unlogged := _limits.admit(name, by)) is not None:
        level = getattr(logging, VOCABULARY[name].level.upper())
        _log.log(level, name, extra={"fields": {**fields, "unlogged": unlogged}})


def failure(name: str, **fields: object) -> None:
    """Something broke; with the traceback of the exception at hand."""
    _log.error(name, exc_info=True, extra={"fields": fields})


# Writer of log lines to a descriptor that never waits for it: a line that cannot go now is lost, and counted.
#
# A daemon's standard error may be a pipe without a reader, a terminal that was stopped, a full disk, or closed. A
# blocking write to any of them would stop the event loop, and with it every engine.

PIPE_BYTES = 4096
"""POSIX's PIPE_BUF on Linux: a pipe that polls as writable takes this many bytes at once."""


class LineWriter:
    """Lines to one descriptor. The caller sees to it that one thread writes at a time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._is_torn = False
        self.lost = 0

    def write(self, line: str) -> bool:
        """Write a line and its end; False where it is lost, or was cut short."""
        text = line.encode("utf-8", "backslashreplace") + b"\n"
        if self._is_torn:  # the last line has no end
            text = b"\n" + text
        left = memoryview(text)
        try:
            while left and self._may_write():
                left = left[os.write(self._descriptor, left[:PIPE_BYTES]) :]
        except OSError as error:
            if error.errno == errno.EBADF:
                self._poll = select.poll()  # closed for good: whatever has the number next is not ours to write to
        if not left:
            self._is_torn = False
            return True
        self.lost += 1
        self._is_torn = self._is_torn or len(left) < len(text)
        return False

    def _may_write(self) -> bool:
        return any(flags & select.POLLOUT for _, flags in self._poll.poll(0))


def keep_standard_descriptors() -> None:
    """Open what is closed of standard input, output and error on /dev/null.

    Else the next socket gets its number, and what libraries print goes there.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
