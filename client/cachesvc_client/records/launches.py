"""Launches of an engine in flight, and the pages and windows that wait for their end before they are given back."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from cachesvc_client.core.errors import InvalidRequest


class Launches:
    """The launches of one lease, numbered from 1; they end in their order. Safe to use from several threads."""

    def __init__(self) -> None:
        self.newest = 0
        self.completed = 0
        self._lock = threading.Lock()

    @property
    def are_under_way(self) -> bool:
        """True while a launch is not complete."""
        return self.completed < self.newest

    def begin(self) -> int:
        """The next launch's number."""
        with self._lock:
            self.newest += 1
            return self.newest

    def complete(self, launch: int) -> None:
        """Note that all launches up to ``launch`` have ended. Idempotent. Raises InvalidRequest for an unknown one."""
        self.check(launch)
        with self._lock:
            self.completed = max(self.completed, launch)

    def check(self, launch: int | None) -> int:
        """``launch``, or the newest for None. Raises InvalidRequest for one that never was."""
        if launch is None:
            return self.newest
        if not 0 <= launch <= self.newest:
            raise InvalidRequest(f"launch {launch} never was; the newest is {self.newest}: take what launch() returned")
        return launch

    def pending(self, launch: int | None) -> int:
        """``launch`` (None: the newest), or 0 where it is complete. Raises InvalidRequest for one that never was."""
        launch = self.check(launch)
        return launch if launch > self.completed else 0


class Due(NamedTuple):
    """Pages and windows to give back now: spare ``pages`` as ``(group, page)``, and windows behind
    ``computed_tokens``, or in some groups what lies before the ``dead_blocks`` that their engine names."""

    pages: list[tuple[int, int]]
    computed_tokens: int
    dead_blocks: tuple[int, ...] = ()


class GiveBacks:
    """Pages and windows that one sequence has to give back, each with the launch whose end it waits for."""

    def __init__(self, launches: Launches) -> None:
        self._launches = launches
        self._spares: list[tuple[int, tuple[int, int]]] = []
        self._windows: list[tuple[int, int, tuple[int, ...]]] = []

    def add_spares(self, pages: Iterable[tuple[int, int]]) -> None:
        """Pages ``(group, page)`` that have just left the tables."""
        newest = self._launches.newest
        self._spares += [(newest, page) for page in pages]

    def hold_windows(self, computed_tokens: int, launch: int | None, dead_blocks: tuple[int, ...] = ()) -> None:
        """Windows may move up to ``computed_tokens``, or by ``dead_blocks``, once ``launch`` (None: the newest) is
        complete."""
        launch = self._launches.check(launch)
        if computed_tokens or dead_blocks:
            self._windows.append((launch, computed_tokens, dead_blocks))

    def take_due(self) -> Due:
        """Remove and return what waits for no launch any more."""
        completed = self._launches.completed
        pages = [page for launch, page in self._spares if launch <= completed]
        due = [(tokens, dead) for launch, tokens, dead in self._windows if launch <= completed]
        if pages:
            self._spares = [held for held in self._spares if held[0] > completed]
        if not due:
            return Due(pages, 0)
        self._windows = [held for held in self._windows if held[0] > completed]
        dead_blocks = tuple(map(max, *filled)) if len(filled := [dead for _, dead in due if dead]) > 1 else ()
        return Due(pages, max(tokens for tokens, _ in due), dead_blocks or (filled[0] if filled else ()))

    def put_back(self, pages: list[tuple[int, int]]) -> None:
        """Pages that were due and could not be given back; the next ``take_due`` has them again."""
        self._spares = [(0, page) for page in pages] + self._spares

    def forget(self) -> None:
        """The daemon has taken everything by itself."""
        self._spares.clear()
        self._windows.clear()
