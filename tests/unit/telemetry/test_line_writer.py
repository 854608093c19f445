"""Log lines go where they can, at once or not at all: real pipes, a full disk, a closed descriptor."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachesvc.telemetry import events
from cachesvc.telemetry.events import PIPE_BYTES, LineWriter


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe's ends, reading end first."""
    reading, writing = os.pipe()
    yield reading, writing
    for end in (reading, writing):
        try:
            os.close(end)
        except OSError:
            assert end in (reading, writing), "a test may close an end itself"


def fill_up(writing: int) -> int:
    """Bytes that a pipe took until it took no more."""
    os.set_blocking(writing, False)
    size = 0
    try:
        while True:
            size += os.write(writing, b"x" * PIPE_BYTES)
    except BlockingIOError:
        os.set_blocking(writing, True)
        return size


def test_a_full_pipe_loses_lines_and_takes_the_next(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    filled = fill_up(writing)
    writer = LineWriter(writing)
    assert not writer.write("lost")
    assert writer.lost == 1
    left = filled
    while left:
        left -= len(os.read(reading, left))
    assert writer.write("kept")
    assert os.read(reading, 100) == b"kept\n"


def test_a_line_that_was_cut_short_is_ended_before_the_next(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    writer = LineWriter(writing)
    assert not writer.write("y" * (1 << 20)), "no pipe takes that much"
    taken = b""
    while not writer.write("next"):
        taken += os.read(reading, 1 << 16)
    os.close(writing)
    while more := os.read(reading, 1 << 16):
        taken += more
    first, second, end = taken.split(b"\n")
    assert set(first) == {ord("y")}
    assert len(first) < 1 << 20
    assert (second, end) == (b"next", b"")


def test_nobody_reads_any_more(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.close(reading)
    writer = LineWriter(writing)
    assert not writer.write("lost")
    assert writer.lost == 1


def test_a_full_disk() -> None:
    with Path("/dev/full").open("wb") as full:
        writer = LineWriter(full.fileno())
        assert not writer.write("lost")
        assert writer.lost == 1


def test_a_closed_descriptor(pipe: tuple[int, int]) -> None:
    writer = LineWriter(pipe[1])
    os.close(pipe[1])
    assert not writer.write("lost")
    assert not writer.write("lost")
    assert writer.lost == 2


def record(name: str, message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord(name, logging.INFO, "", 0, message, arguments, None)
    made.__dict__ |= extra
    return made


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (record("cachesvc", "ready", fields={"port": 1}), {"event": "ready", "port": 1}),
        (
            record("cachesvc.memory.x", "gpu_broken device=%s reason=%s", "g", "a b"),
            {"event": "gpu_broken", "device": "g", "reason": "a b"},
        ),
        (record("cachesvc.memory.x", "copy_done ticket=%d", 3), {"event": "copy_done", "ticket": 3}),
        (
            record("asyncio", "Task %s", "t"),
            {"event": "library_log", "logger": "asyncio", "text": "Task t"},
        ),
    ],
)
def test_every_line_is_an_event(said: logging.LogRecord, expected: dict[str, object]) -> None:
    line = json.loads(events.JsonLines().format(said))
    assert {name: value for name, value in line.items() if name not in ("time", "level")} == expected
