"""Clock of an eviction policy that learns from the arrival of requests."""

from __future__ import annotations

from cachesvc.ledger.pages.change_log import Moment


class Clock:
    """The daemon's time; or, while all engines of a model report another one, theirs: that of a trace that they replay,
    as fast as they can. It never goes back while it is reported. An engine cannot report it beside others that use the
    daemon's time, so that no engine makes others' blocks look old.

    ``is_own``: requests use the daemon's time."""

    __slots__ = ("_ahead", "_moment", "_told", "is_own")

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self._told: float | None = None
        self.is_own = False
        self._ahead = 0.0

    @property
    def is_told(self) -> bool:
        """True while engines set the time."""
        return self._told is not None

    @property
    def seconds(self) -> float:
        """Seconds since an arbitrary origin."""
        return self._moment.seconds + self._ahead if self._told is None else self._told

    def tell(self, seconds: float) -> bool:
        """Set the time for its reporters; False where other engines use the daemon's time."""
        if self.is_own:
            return False
        self._told = seconds if self._told is None else max(self._told, seconds)
        return True

    def begin_anew(self) -> None:
        """No request uses this clock any more; the next one may set it."""
        self.is_own = False

    def keep_own(self) -> None:
        """A request uses the daemon's time: from now on all do."""
        if not self.is_own:
            self.is_own = True
            self._ahead = 0.0 if self._told is None else max(0.0, self._told - self._moment.seconds)
            self._told = None
