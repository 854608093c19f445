"""Fencing: discard a step's tokens unless the lease was held while their pages were read.

An engine that was stopped for longer than its lease goes on where it was: in the middle of a step, whose hits the
daemon let go meanwhile, and others may have written. So an iteration begins with a look at the lease, after which what
is lost is not scheduled; and ends with one, when a step's output has come. By then all that the step read was read, on
every rank and by every kernel: tokens wait for the last of them. The engine gives them out after that.

    look  ->  schedule  ->  begin_step  ->  kernels  ->  end_step  ->  tokens

Both cost a comparison while beats are answered in time (``Lease.is_sure``), and a round trip where they were late.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto

from cachesvc_client import CacheClientError, DaemonUnavailable, Lease, LeaseLost

LOOK_S = 1.0
"""The scheduler waits no longer for a daemon that says nothing; the end of the step waits for as long as a lease."""

log = logging.getLogger(__name__)


class Dropped(Enum):
    """Verdict of the workers on an output. REPEATED: it is void, and the engine computes it again; LOST: it is void,
    and the engine could not be told."""

    NOT = auto()
    REPEATED = auto()
    LOST = auto()


class PagesLapsed(RuntimeError):
    """Requests under way may have read another engine's pages. There is no way to take back a step whose output
    has come, so the engine ends, and gives none of it out."""


class Vouching:
    """``lease``: the one that the engine is on. Used from the engine's scheduler thread."""

    def __init__(self, lease: Callable[[], Lease]) -> None:
        self._lease = lease
        self._has_looked = False
        self._under_way: deque[Lease | None] = deque()

    def look(self) -> bool:
        """Look for a lost lease before anything is scheduled. True once in each iteration."""
        if self._has_looked:
            return False
        self._has_looked = True
        lease = self._lease()
        if not lease.is_sure:
            with suppress(CacheClientError):  # the lease says it from now on; without an answer, the end asks again
                lease.make_sure(LOOK_S)
        return True

    def begin_step(self, *, computes: bool) -> None:
        """Note a scheduled step."""
        self._has_looked = False
        self._under_way.append(self._lease() if computes else None)

    def end_step(self, dropped: Dropped) -> bool:
        """The output of the first of the steps under way has come. ``dropped``: whether a worker has found it void.
        Where all requests with pages were begun anew, that is good if none of them was scheduled again, and if they
        will find the lease lost. True where the step has computed. Raises PagesLapsed."""
        lease = self._under_way.popleft()
        is_dropped = dropped is not Dropped.NOT
        if lease is None or (lease.is_sure and not is_dropped):
            return lease is not None
        limit_s, why = lease.record.silence_limit_s, "a worker says so"
        try:
            lease.make_sure(limit_s)
            if not is_dropped:
                return True
        except (LeaseLost, DaemonUnavailable) as lost:
            if dropped is Dropped.REPEATED and not self._under_way:
                log.warning("step_computed_again lease=%s why=%s", lease.id, lost)
                return True
            why = str(lost)
        except CacheClientError as error:
            why = str(error)
        raise PagesLapsed(
            f"this engine was stopped, or said nothing, for longer than its lease of {limit_s:g} s ({why}). Others may "
            "have got the pages that its requests read: it gives out none of their tokens, and ends. Start it again, "
            "and end an engine rather than freeze it"
        )
