"""A small object that is written and read back: the only proof that an engine works."""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Callable

from cachesvc.storage.objects import ObjectStore
from cachesvc.storage.seam import LAYOUT_ID_BYTES, ObjectName, Outcome, Part, Scope

SCOPE = Scope(bytes(32), b"canary".ljust(LAYOUT_ID_BYTES, b"\0"))
CANARY_BYTES = 4096

Flown = Callable[[bool], None]


class Canary:
    """Flies once at a time, in registered memory; what a late one has is left to the engine, and new is taken."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._page: memoryview | None = None

    def fly(self, deadline: float, flown: Flown) -> None:
        """Write a canary and read it back: ``flown`` is called once, on any thread, with whether it came back by
        ``deadline`` (monotonic seconds)."""
        page = self._take_page()
        content = secrets.token_bytes(CANARY_BYTES)
        page[:] = content
        name = ObjectName(SCOPE, secrets.token_bytes(32), Part(0, 0, 1))

        def put(_: int, outcome: Outcome) -> None:
            if outcome is not Outcome.OK:  # an engine that is full, and says so at once, can still be read
                self._end(page, outcome, flown, is_good=outcome is Outcome.BUSY)
                return
            page[:] = bytes(CANARY_BYTES)
            self._store.get([name], [(page,)], deadline, got, self._drop)

        def got(_: int, outcome: Outcome) -> None:
            is_good = outcome is Outcome.OK and page == content
            self._store.backend.remove([name])
            self._end(page, outcome, flown, is_good=is_good)

        self._store.put([name], [(page,)], deadline, put, lambda _: self._store.backend.remove([name]))

    def _take_page(self) -> memoryview:
        page, self._page = self._page, None
        if page is None:
            page = memoryview(mmap.mmap(-1, CANARY_BYTES))
            self._store.backend.register(page)
        return page

    def _end(self, page: memoryview, outcome: Outcome, flown: Flown, *, is_good: bool) -> None:
        if outcome is not Outcome.LATE:
            self._page = page
        flown(is_good)

    @staticmethod
    def _drop(_: int) -> None:
        """A late one is back: its page is not used again."""
