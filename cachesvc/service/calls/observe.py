"""Counts calls as the dispatcher carries them out: their times, their outcomes, and spans for those that are traced."""

from __future__ import annotations

from collections.abc import Iterable

from cachesvc.model.numbers.histogram import Histogram
from cachesvc.telemetry.tracing import Span, Tracer, current_span

OK = "OK"
OTHER = "other"
CANCELLED = "CANCELLED"
Parent = dict[str, str] | None
"""Headers that say whose child a call's span is; None: the call is not traced."""


class CallWatch:
    """Counts by ``Service/Method``; used on the event loop alone. ``tracer``: None traces nothing."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self.seconds: dict[str, Histogram] = {}
        self.codes: dict[tuple[str, str], int] = {}
        self.tracer = tracer

    def know(self, names: Iterable[str]) -> None:
        """Known methods: shown before their first call, and counted apart in refusals."""
        for name in names:
            self.seconds.setdefault(name, Histogram())

    def refused(self, path: str, code: str) -> None:
        """Count a call that no service got. Its caller chooses ``path``: unknown ones count together."""
        name = path.removeprefix("/kvcache.v1.")
        key = (name if name in self.seconds else OTHER, code)
        self.codes[key] = self.codes.get(key, 0) + 1

    def begin(self, name: str, headers: dict[str, str]) -> Span | None:
        """A call begins that is traced, unless it is not sampled; the running task works for it until ``leave``."""
        span = None if self.tracer is None else self.tracer.begin_call(name, headers)
        if span is not None:
            current_span.set(span)
        return span

    def leave(self) -> None:
        """The running task turns to other calls; a task of the call's own keeps its span."""
        current_span.set(None)

    def end(self, name: str, seconds: float, code: str, span: Span | None = None) -> None:
        """Observe a call that was answered, refused, or given up."""
        key = (name, code)
        self.codes[key] = self.codes.get(key, 0) + 1
        self.seconds[name].observe(seconds)
        if span is not None:
            span.end(code)
