"""What time it is for an eviction policy that learns from when requests come."""

from __future__ import annotations

from cachesvc.ledger.journal import Moment


class Clock:
    """The daemon's time, until engines tell another one: that of a trace that they replay, as fast as they can."""

    __slots__ = ("_moment", "_told")

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self._told: float | None = None

    @property
    def seconds(self) -> float:
        """Since whatever it counts from."""
        return self._moment.seconds if self._told is None else self._told

    def tell(self, seconds: float) -> None:
        """It is ``seconds`` for those who tell; from now on it is what they tell, and goes back for nobody."""
        self._told = seconds if self._told is None else max(self._told, seconds)
