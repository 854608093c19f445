"""Forwarder of transfers' ends: the swap engine is made before the listeners to its transfers."""

from __future__ import annotations

from collections.abc import Callable


class TransferEnds:
    """The way from the swap engine to the node, which is made after it: ``connect`` them before either starts."""

    def __init__(self) -> None:
        self._told: list[Callable[[int, Exception | None], None]] = []

    def connect(self, told: Callable[[int, Exception | None], None]) -> None:
        """Tell this one too."""
        self._told.append(told)

    def tell(self, ticket: int, error: Exception | None) -> None:
        """A transfer has ended; from any thread."""
        for told in self._told:
            told(ticket, error)
