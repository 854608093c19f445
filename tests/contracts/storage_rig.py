"""Storage engines as the contract suite and the negative cases want them: started, turned and damaged from outside."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cachesvc.storage.file.engine import FileOptions, FileStorage
from cachesvc.storage.file.space import object_path
from cachesvc.storage.objects import ObjectStore, Verb
from cachesvc.storage.seam import WHOLE, ObjectName, Outcome, Part, Scope, StorageBackend
from tests.sim.sim_storage import SimStorage

PAGE_BYTES = 8192
SCOPE = Scope(b"n" * 32, b"l" * 8)
OTHER = Scope(b"o" * 32, b"l" * 8)
FAR = 1e9


class Turning(Protocol):
    """An engine under test. ``crank``: what was asked comes to its end. ``reopen``: as after a restart."""

    @property
    def backend(self) -> StorageBackend:
        """The engine."""

    def crank(self) -> None:
        """Until nothing is under way."""

    def reopen(self) -> Turning:
        """The engine of another daemon, over the same objects; the first one was killed."""

    def damage(self, name: ObjectName, change: Callable[[bytes], bytes]) -> None:
        """Something else changes what is kept of an object."""

    def content(self, name: ObjectName) -> bytes:
        """Stored bytes of an object, header and all."""

    def swap(self, one: ObjectName, other: ObjectName) -> None:
        """Something else exchanges two objects' contents."""

    def close(self) -> None:
        """The end of the test."""


@dataclass
class SimTurning:
    """The simulated engine."""

    backend: SimStorage = field(default_factory=SimStorage)

    def crank(self) -> None:
        self.backend.crank()

    def reopen(self) -> SimTurning:
        other = SimStorage()
        other.objects = self.backend.objects
        other.labels = self.backend.labels
        other.start()
        return SimTurning(other)

    def damage(self, name: ObjectName, change: Callable[[bytes], bytes]) -> None:
        self.backend.objects[name] = change(self.backend.objects[name])

    def content(self, name: ObjectName) -> bytes:
        return self.backend.objects[name]

    def swap(self, one: ObjectName, other: ObjectName) -> None:
        objects = self.backend.objects
        objects[one], objects[other] = objects[other], objects[one]

    def close(self) -> None:
        self.backend.close()


@dataclass
class FileTurning:
    """``file``, with threads of its own: what was asked comes to its end by itself."""

    options: FileOptions

    def __post_init__(self) -> None:
        self.backend = FileStorage(self.options)

    def crank(self) -> None:
        """Nothing to turn."""

    def reopen(self) -> FileTurning:
        return FileTurning(self.options)

    def path(self, name: ObjectName) -> Path:
        return Path(object_path(Path(self.options.root) / "objects", name))

    def damage(self, name: ObjectName, change: Callable[[bytes], bytes]) -> None:
        self.path(name).write_bytes(change(self.content(name)))

    def content(self, name: ObjectName) -> bytes:
        return self.path(name).read_bytes()

    def swap(self, one: ObjectName, other: ObjectName) -> None:
        first, second = self.path(one), self.path(other)
        aside = first.with_name("aside")
        first.rename(aside)
        second.rename(first)
        aside.rename(second)

    def close(self) -> None:
        self.backend.close()


def name_of(key: str, part: Part = Part(0, 0, 1), scope: Scope = SCOPE) -> ObjectName:  # noqa: B008 - immutable
    """An object of a block called ``key``."""
    return ObjectName(scope, key.encode().ljust(32, b"."), part)


WHOLE_PART = Part(WHOLE, 0, 1)


def content_of(name: ObjectName, size_bytes: int = PAGE_BYTES) -> bytes:
    """Content of an object: some function of its name."""
    return (name.text.encode() * (size_bytes // 64 + 1))[:size_bytes]


@dataclass
class Asked:
    """Outcome of a call. ``back``: items that came back after their wait had ended."""

    names: list[ObjectName]
    pages: list[tuple[memoryview, ...]]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    back: list[int] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def each(self, index: int, outcome: Outcome) -> None:
        assert index not in self.outcomes, "an item ends once"
        self.outcomes[index] = outcome
        if len(self.outcomes) == len(self.names):
            self.ended.set()

    def told(self) -> list[Outcome]:
        """Outcome of every item; waits for it."""
        if self.names:
            self.ended.wait()
        return [self.outcomes[at] for at in range(len(self.names))]

    def content(self, at: int) -> bytes:
        return b"".join(self.pages[at])


class Bench:
    """An engine behind an ``ObjectStore``, in a time that the test sets."""

    def __init__(self, turning: Turning) -> None:
        self.turning = turning
        self.now = 100.0
        self.store = ObjectStore(turning.backend, lambda: self.now)

    def start(self) -> Bench:
        self.store.start()
        return self

    def memory(self, sizes: tuple[int, ...] = (PAGE_BYTES,)) -> tuple[memoryview, ...]:
        """Pages in a registered chunk of their own."""
        room = -(-sum(sizes) // 4096) * 4096
        chunk = memoryview(mmap.mmap(-1, room))
        self.turning.backend.register(chunk)
        pages, at = [], 0
        for size in sizes:
            pages.append(chunk[at : at + size])
            at += size
        return tuple(pages)

    def put(self, names: list[ObjectName], deadline: float = FAR, sizes: tuple[int, ...] = (PAGE_BYTES,)) -> Asked:
        """Begin to keep objects with the content of their names."""
        asked = Asked(names, [self.memory(sizes) for _ in names])
        for name, pages in zip(names, asked.pages, strict=True):
            content, at = content_of(name, sum(sizes)), 0
            for page in pages:
                page[:] = content[at : at + len(page)]
                at += len(page)
        self.store.prepare(Verb.PUT, names, asked.pages, deadline, asked.each, asked.back.append)()
        return asked

    def get(self, names: list[ObjectName], deadline: float = FAR, sizes: tuple[int, ...] = (PAGE_BYTES,)) -> Asked:
        """Begin to bring objects."""
        asked = Asked(names, [self.memory(sizes) for _ in names])
        self.store.prepare(Verb.GET, names, asked.pages, deadline, asked.each, asked.back.append)()
        return asked

    def keep(self, names: list[ObjectName], sizes: tuple[int, ...] = (PAGE_BYTES,)) -> list[Outcome]:
        """Put and wait."""
        asked = self.put(names, sizes=sizes)
        self.turning.crank()
        return asked.told()

    def fetch(self, names: list[ObjectName], sizes: tuple[int, ...] = (PAGE_BYTES,)) -> list[Outcome]:
        """Get, wait, and look at every byte of what is OK."""
        asked = self.get(names, sizes=sizes)
        self.turning.crank()
        asked.told()
        for at, name in enumerate(names):
            if asked.outcomes[at] is Outcome.OK:
                assert asked.content(at) == content_of(name, sum(sizes)), "what is OK is right"
        return asked.told()

    def exists(self, names: list[ObjectName]) -> list[bool]:
        """Ask and wait."""
        told: list[bool] = []
        ended = threading.Event()

        def found(answers: Sequence[bool] | None) -> None:
            assert answers is not None, "it could find out"
            told.extend(answers)
            ended.set()

        self.store.backend.exists(names, FAR, found)
        self.turning.crank()
        ended.wait()
        return told
