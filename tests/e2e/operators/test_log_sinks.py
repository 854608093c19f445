"""A daemon whose standard error is full, blocked or closed serves on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cachesvc_client import CacheClient, DaemonUnavailable

from tests.e2e.engine import Engine, prompt
from tests.e2e.rig import FLAGS, wait_until

CLOSED = "closed"


@contextmanager
def serving(folder: Path, stderr: int | str) -> Iterator[str]:
    """The socket of a daemon that writes its log to ``stderr``, a descriptor or CLOSED; it must end with code 0."""
    path = str(folder / "cachesvc.sock")
    command = [sys.executable, "-m", "cachesvc", "--socket", path, *FLAGS, "--log-level", "debug"]
    if stderr == CLOSED:
        process = subprocess.Popen(["/bin/sh", "-c", 'exec "$@" 2>&-', "sh", *command], stdin=subprocess.DEVNULL)
    else:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=int(stderr))
    try:
        wait_until(lambda: process.poll() is not None or answers(path), "the daemon serves")
        assert process.poll() is None, "it ended by itself"
        yield path
    finally:
        process.terminate()
        code = process.wait()
    assert code == os.EX_OK


def answers(path: str) -> bool:
    """True once a client can connect."""
    try:
        with CacheClient(path):
            return True
    except DaemonUnavailable:
        return False


def serve_prompts(path: str, count: int) -> None:
    """Leases opened and closed, each of which is logged, with a prompt each."""
    for seed in range(count):
        with Engine(path, device_pages=8, host_pages=8) as engine:
            engine.serve(prompt(seed, 4))


def test_a_full_disk(folder: Path) -> None:
    with Path("/dev/full").open("wb") as full, serving(folder, full.fileno()) as path:
        serve_prompts(path, 3)


def test_closed(folder: Path) -> None:
    with serving(folder, CLOSED) as path:
        serve_prompts(path, 3)


@pytest.mark.parametrize("is_read_later", [False, True])
def test_a_pipe_that_nobody_reads(folder: Path, is_read_later: bool) -> None:
    """A pipe holds 64 KiB: it is full before the daemon starts."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"x\n" * 2048)
    except BlockingIOError:
        os.set_blocking(writing, True)
    os.set_blocking(reading, False)
    try:
        with serving(folder, writing) as path:
            serve_prompts(path, 2)
            if is_read_later:
                drain(reading)
                serve_prompts(path, 1)
                assert b'"event": "log_lines_lost"' in drain(reading)
    finally:
        os.close(reading)
        os.close(writing)


def drain(reading: int) -> bytes:
    """Content of a pipe now."""
    taken = b""
    try:
        while True:
            taken += os.read(reading, 1 << 16)
    except BlockingIOError:
        return taken


def test_debug_lines_are_about_the_cache(folder: Path) -> None:
    with (folder / "log").open("wb") as log, serving(folder, log.fileno()) as path:
        serve_prompts(path, 3)
    text = (folder / "log").read_text(encoding="utf-8")
    assert text.count('"event": "lease_opened"') == 3
    assert "running loop" not in text
