"""Forwarder of transfers' ends: the swap engine is made before the listeners to its transfers."""

from __future__ import annotations

from collections.abc import Callable


class TransferEnds:
    """The way from the swap engine to the node, which is made after it: ``connect`` them before either starts."""

    def __init__(self) -> None:
        self._told: list[Callable[[int, Exception | None], None]] = []

    def connect(self, told: Callable[[int, Exception | None], None]) -> None:
        """Add a listener."""
        self._told.append(told)

    def tell(self, ticket: int, error: Exception | None) -> None:
        """Report an ended transfer, from any thread."""
        for told in self._told:
            told(ticket, error)
