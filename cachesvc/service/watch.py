"""Counts calls as the dispatcher carries them out: their times, their outcomes, and spans for those that are traced."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from cachesvc.model.histogram import Histogram
from cachesvc.telemetry.tracing import Span, Tracer, current_span

OK = "OK"
OTHER = "other"
CANCELLED = "CANCELLED"
Parent = dict[str, str] | None
"""Headers that say whose child a call's span is; None: the call is not traced."""


class CallWatch:
    """Counts by ``Service/Method``; used on the event loop alone. ``tracer``: None traces nothing."""

    def __init__(self, tracer: Tracer | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, Histogram] = {}
        self.codes: dict[tuple[str, str], int] = {}
        self.tracer = tracer
        self._clock = clock

    def know(self, names: Iterable[str]) -> None:
        """Methods that there are: shown before their first call, and told apart where a call is let past to none."""
        for name in names:
            self.seconds.setdefault(name, Histogram())

    def refused(self, path: str, code: str) -> None:
        """A call that was let past to no service. Its caller chooses ``path``: only known ones are told apart."""
        name = path.removeprefix("/kvcache.v1.")
        self._count(name if name in self.seconds else OTHER, code)

    def begin(self, name: str, parent: Parent) -> Watched:
        """A call begins; the running task works for it until ``leave`` or ``end``."""
        span = None if self.tracer is None or parent is None else self.tracer.begin_call(name, parent)
        if span is not None:
            current_span.set(span)
        return Watched(self, name, self._clock(), span)

    def end(self, watched: Watched, code: str) -> None:
        """The call is answered, refused, or given up."""
        self.seconds[watched.name].observe(self._clock() - watched.began)
        self._count(watched.name, code)
        if watched.span is not None:
            watched.span.end(code)

    def _count(self, name: str, code: str) -> None:
        key = (name, code)
        self.codes[key] = self.codes.get(key, 0) + 1


class Watched:
    """One call that is being watched."""

    __slots__ = ("_watch", "began", "name", "span")

    def __init__(self, watch: CallWatch, name: str, began: float, span: Span | None) -> None:
        self._watch = watch
        self.name = name
        self.began = began
        self.span = span

    def leave(self) -> None:
        """The running task turns to other calls; a task of this call's own keeps its span."""
        if self.span is not None:
            current_span.set(None)

    def end(self, code: str) -> None:
        """The call is over."""
        self._watch.end(self, code)
