"""Digests of whole files, kept on disk so that a second start of an engine reads nothing again.

An entry belongs to (device, inode, size, mtime, ctime, algorithm): the change time catches a file whose modification
time was set back. Entries are trusted only where no other user may write them.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol

PIECE_BYTES = 256 << 20
"""Bytes hashed between two looks at the clock; BLAKE3 uses all cores for each piece."""

QUIET_S = 5.0
"""Hashing that takes longer tells how far it is, each time as much later."""

SETTLED_S = 2.0
"""File systems stamp changes in ticks of up to this long: of a file that changed later than that ago, the next change
may bear the same stamp, so its digest is not kept."""

MOST_ENTRIES = 4096
"""A checkpoint of a large model has some 200 files."""

DIGEST = re.compile(r"[a-z0-9]+:[0-9a-f]{64}")

log = logging.getLogger(__name__)


class Hasher(Protocol):
    """Protocol of a ``hashlib`` digest."""

    def update(self, data: memoryview, /) -> object:
        """Add bytes."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes, 64 hexadecimal digits."""


def new_hasher() -> tuple[str, Hasher]:
    """Return the fastest algorithm that there is: BLAKE3 on all cores, which the engine brings, else BLAKE2b."""
    try:
        from blake3 import blake3
    except ImportError:
        return "blake2b", hashlib.blake2b(digest_size=32)
    return "blake3", blake3(max_threads=blake3.AUTO)


class Progress:
    """Tells in the log how far hashing is, where it takes long. ``total_bytes``: of all files."""

    def __init__(self, total_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total_bytes = total_bytes
        self._clock = clock
        self._began_s = self._told_s = clock()
        self._done_bytes = 0

    def add(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        now_s = self._clock()
        if now_s - self._told_s >= QUIET_S:
            self._told_s = now_s
            speed = self._done_bytes / max(now_s - self._began_s, 1e-6)
            log.info(
                "weights_hashing done_gib=%.1f total_gib=%.1f gib_per_s=%.2f",
                self._done_bytes / 2**30,
                self._total_bytes / 2**30,
                speed / 2**30,
            )


def cache_folder() -> Path | None:
    """Return where entries are kept: ``$XDG_CACHE_HOME/cachesvc/digests``, else below ``~/.cache``; None for a user
    without a home."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(base).expanduser() / "cachesvc" / "digests"
    except RuntimeError:
        return None


class FileDigests:
    """``folder``: for entries; where it cannot be used, every file is hashed each time. Safe between processes: of
    several that want one file's digest at once, one hashes it."""

    def __init__(self, folder: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self._folder = _usable(cache_folder() if folder is None else folder)
        self._clock = clock

    def digest(self, path: Path, progress: Progress | None = None) -> str:
        """Return ``ALGORITHM:HEX`` of all bytes of a file. Raises OSError."""
        algorithm, hasher = new_hasher()
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if self._folder is None:
                return _hash(file.fileno(), status.st_size, algorithm, hasher, progress)
            entry = self._folder / _entry_name(status, algorithm)
            with _locked(entry.with_suffix(".lock")):
                known = _read_entry(entry)
                if known is not None:
                    return known
                found = _hash(file.fileno(), status.st_size, algorithm, hasher, progress)
                is_settled = self._clock() - status.st_ctime >= SETTLED_S
                if is_settled and _entry_name(os.fstat(file.fileno()), algorithm) == entry.name:
                    _write_entry(entry, found)
        self._prune()
        return found

    def _prune(self) -> None:
        assert self._folder is not None
        with suppress(OSError):
            entries = sorted(self._folder.iterdir(), key=lambda each: each.stat().st_mtime)
            for each in entries[: max(0, len(entries) - 2 * MOST_ENTRIES)]:
                each.unlink(missing_ok=True)


def _usable(folder: Path | None) -> Path | None:
    """The folder, made if need be; None where it cannot be made or others may write to it."""
    if folder is None:
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        log.info("digests_not_kept folder=%s why=%s", folder, error)
        return None
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        log.warning("digests_not_kept folder=%s why=other users may write to it", folder)
        return None
    return folder if os.access(folder, os.W_OK) else None


def _entry_name(status: os.stat_result, algorithm: str) -> str:
    facts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, algorithm)
    return hashlib.blake2b(repr(facts).encode(), digest_size=20, person=b"kv-file-digest").hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes; where there can be none, as on some network file systems, do without."""
    with ExitStack() as held:
        with suppress(OSError):
            lock = held.enter_context(path.open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read_entry(entry: Path) -> str | None:
    try:
        status = entry.stat()
        text = entry.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None
    return text if DIGEST.fullmatch(text) else None


def _write_entry(entry: Path, digest: str) -> None:
    try:
        with tempfile.NamedTemporaryFile("w", dir=entry.parent, delete=False, encoding="ascii") as file:
            file.write(digest)
        Path(file.name).replace(entry)
    except OSError as error:
        log.info("digest_not_kept folder=%s why=%s", entry.parent, error)


def _hash(descriptor: int, size_bytes: int, algorithm: str, hasher: Hasher, progress: Progress | None) -> str:
    if size_bytes:
        with mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            for first in range(0, size_bytes, PIECE_BYTES):
                with view[first : first + PIECE_BYTES] as piece:
                    hasher.update(piece)
                    if progress is not None:
                        progress.add(len(piece))
    return f"{algorithm}:{hasher.hexdigest()}"
