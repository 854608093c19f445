"""Tokens that have left the tokens' file: their remaining rights, their grace, and the callers that still show them.

A token of an engine that leaves the file is *retired*: for a grace it keeps the leases alive that its engine has, and
serves their calls. The engine's own file changes later than the daemon's, and its requests must not pay for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cachesvc.service.access.auth import Caller, Scope
from cachesvc.telemetry import events

MOST_REMEMBERED = 4096
"""Most tokens remembered, as many as a file may have entries; the oldest are forgotten first, and are then unknown."""
SHOWN_SECONDS = 30.0
"""Time after its last call for which a token counts as shown, seconds: engines send several heartbeats within it."""


class Shown(NamedTuple):
    """A retired token that callers still show. ``left_seconds``: of its grace; 0: it is refused."""

    name: str
    tenant: str
    left_seconds: float


@dataclass(slots=True, eq=False)
class _Entry:
    """``calls``: of the caller when ``look`` saw it last; ``shown_at``: when it had made more."""

    caller: Caller
    calls: int
    shown_at: float = -math.inf
    is_told: bool = False
    is_refusal_told: bool = False


class Retired:
    """Retired tokens by digest. ``grace_seconds``: 0 accepts none. ``now``: monotonic seconds."""

    def __init__(self, grace_seconds: float, now: Callable[[], float]) -> None:
        self._grace_seconds = grace_seconds
        self._now = now
        self._entries: dict[str, _Entry] = {}

    def callers(self) -> dict[tuple[str, str], Caller]:
        """All that are remembered, by what they prove."""
        return {("token", digest): entry.caller for digest, entry in self._entries.items()}

    def find(self, digest: str) -> Caller | None:
        """Caller that had this token; None for one that is not remembered."""
        entry = self._entries.get(digest)
        return None if entry is None else entry.caller

    def retire(self, caller: Caller) -> None:
        """The file has its entry no more: an engine's token has its grace, any other is refused from now on."""
        is_of_engine = bool(caller.digest) and Scope.ENGINE in caller.scopes
        if is_of_engine and self._grace_seconds and not caller.revoked:
            caller.grace_ends = self._now() + self._grace_seconds
            events.event(
                "token_retired", caller=caller.name, tenant=caller.tenant or "", seconds=round(self._grace_seconds)
            )
        else:
            caller.revoked = True
        self._remember(caller)

    def revoke(self, caller: Caller) -> None:
        """The file says that it is revoked: its calls end now."""
        caller.revoked = True
        self._remember(caller)

    def forget(self, caller: Caller) -> None:
        """The file has an entry for its token, which says what counts."""
        caller.grace_ends = None
        self._entries.pop(caller.digest, None)

    def look(self) -> None:
        """End what has had its grace, and tell once of each caller that still shows its token."""
        now = self._now()
        for entry in self._entries.values():
            caller = entry.caller
            if caller.grace_ends is not None and now >= caller.grace_ends:
                caller.revoked = True
            if caller.calls == entry.calls:
                continue
            entry.calls, entry.shown_at = caller.calls, now
            if caller.revoked and not entry.is_refusal_told:
                entry.is_refusal_told = True
                events.warning("token_refused", caller=caller.name, tenant=caller.tenant or "")
            elif not caller.revoked and not entry.is_told:
                entry.is_told = True
                left = round((caller.grace_ends or now) - now)
                events.warning("token_retired_shown", caller=caller.name, tenant=caller.tenant or "", seconds=left)

    def shown(self) -> list[Shown]:
        """Tokens that callers have shown recently, the one whose grace ends first at the head."""
        now = self._now()
        entries = (entry for entry in self._entries.values() if now - entry.shown_at <= SHOWN_SECONDS)
        found = [Shown(e.caller.name, e.caller.tenant or "", _left(e.caller, now)) for e in entries]
        return sorted(found, key=lambda each: each.left_seconds)

    def _remember(self, caller: Caller) -> None:
        if not caller.digest:
            return
        before = self._entries.pop(caller.digest, None)
        entry = self._entries[caller.digest] = _Entry(caller, caller.calls)
        if before is not None:
            entry.is_refusal_told = before.is_refusal_told
        while len(self._entries) > MOST_REMEMBERED:
            oldest = self._entries.pop(next(iter(self._entries)))
            oldest.caller.revoked = True


def _left(caller: Caller, now: float) -> float:
    return 0.0 if caller.revoked or caller.grace_ends is None else max(caller.grace_ends - now, 0.0)
