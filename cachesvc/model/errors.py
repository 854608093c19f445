"""Errors by name: one tree for the daemon and its client. The daemon turns an error into its code, the edge
the code into a gRPC status; the client makes of code and sentence the same error again, by ``BY_CODE``.

CacheError                    also under the name CacheClientError
├── InvalidRequest            the request itself is wrong: fix it, do not retry
│   ├── LayoutRejected        a layout that cannot be built
│   ├── KeyMisplaced          a key that is known below another block than the request says
│   └── KeyReused             an idempotency key came back with another request
├── NotFound                  model, lease, sequence, replica or ticket is not known to the daemon
├── Conflict                  right request, wrong moment: another call must come first
├── LeaseLost                 all that the lease held is gone: recompute, open a new lease
├── NotOwned                  the page or sequence belongs to another owner
├── LoadFailed                a load that the sequence relies on has failed: release it, match again, recompute
├── PoolExhausted             not enough pages, with the numbers: release, ask for fewer, or recompute
├── LimitExceeded             more than a limit: send less at a time
├── EventsMissed              changes were missed that the daemon no longer knows: subscribe with a snapshot
│   ├── EventsForgotten       they happened too long ago
│   ├── OtherEpoch            they are of an earlier life of the daemon
│   └── SubscriberTooSlow     the subscriber fell too far behind and was cut off
├── QuotaExceeded             more than this tenant may have: release, slow down, or go on without the cache
├── Unauthenticated           the daemon wants a token, or does not know this one
├── PermissionDenied          the token is good for something else
├── NotSupported              known by name, not built, or not possible in this process
├── DeadlineExceeded          no answer in time; the call may or may not have taken effect
└── Unavailable               something that is needed is not there: a GPU, a port, a package
    └── DaemonUnavailable     the daemon is not there or has ended: go on without the cache, reconnect later
        └── DaemonDraining    it wants to go and opens nothing new: finish what runs, open nothing

LedgerBroken                  a bug of the daemon's own, outside of the tree: no caller did it, none can mend it
└── IllegalMove               a copy or a page was asked to move against its table

Errors that only a client can see are added to the tree in ``cachesvc_client.core.errors``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from enum import Enum
from typing import Self


class ErrorCode(Enum):
    """Stable names of the kinds of failure; ``cachesvc.wire.convert`` maps each to a gRPC code."""

    INVALID = "INVALID"
    KEY_MISPLACED = "KEY_MISPLACED"
    NOT_FOUND = "NOT_FOUND"
    CONFLICT = "CONFLICT"
    LEASE_LOST = "LEASE_LOST"
    NOT_OWNED = "NOT_OWNED"
    LOAD_FAILED = "LOAD_FAILED"
    EXHAUSTED = "EXHAUSTED"
    LIMIT = "LIMIT"
    UNSUPPORTED = "UNSUPPORTED"
    UNAVAILABLE = "UNAVAILABLE"
    DRAINING = "DRAINING"
    GAP = "GAP"
    TOO_SLOW = "TOO_SLOW"
    DEADLINE = "DEADLINE"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"


class CacheError(Exception):
    """Base of every expected failure. ``str(error)`` says what was wrong and what to do.

    Facts are fields, which cross the wire; a field that the sender did not know is None. Errors can be copied and
    pickled, and cross processes. ``sequence_id``: of a call for several sequences, the one that it was refused for.
    """

    code: ErrorCode = ErrorCode.INVALID
    sequence_id: int | None = None

    def __init__(self, message: str = "", **facts: object) -> None:
        super().__init__(message)
        self.__dict__.update(facts)

    @classmethod
    def from_message(cls, message: str, facts: Mapping[str, int | str] | None = None) -> Self:
        """Make an error from its sentence and its facts. Facts that this kind of error does not declare are dropped."""
        error = cls.__new__(cls, message)
        declared = {name for each in cls.__mro__ for name in inspect.get_annotations(each)} - {"code"}
        for name, value in (facts or {}).items():
            if name in declared:
                setattr(error, name, value)
        return error

    def facts(self) -> dict[str, int | str]:
        """Return the fields that are numbers or words, by name."""
        return {name: value for name, value in self.__dict__.items() if type(value) in (int, str)}

    def __reduce__(self) -> tuple[object, ...]:
        return type(self).from_message, (str(self),), self.__dict__


class InvalidRequest(CacheError):
    """The request is wrong in itself."""


class LayoutRejected(InvalidRequest):
    """A layout whose numbers contradict each other or exceed a limit."""


class KeyMisplaced(InvalidRequest):
    """The key of block ``block`` is not that of a block below those that the request has before it: a key's parent is
    part of what it names."""

    code = ErrorCode.KEY_MISPLACED
    block: int | None = None

    def __init__(self, block: int) -> None:
        super().__init__(
            f"block {block}: its key is not that of a block below those before it; chain the keys", block=block
        )


class KeyReused(InvalidRequest):
    """The idempotency key was used before for a different request."""

    request_id: int | None = None

    def __init__(self, request_id: int) -> None:
        super().__init__(
            f"request_id {request_id} was used before for a different request; use a new id", request_id=request_id
        )


class NotFound(CacheError):
    code = ErrorCode.NOT_FOUND
    kind: str | None = None
    name: object = None

    def __init__(self, kind: str, name: object, hint: str = "") -> None:
        super().__init__(f"unknown {kind} {name!r}" + (f"; {hint}" if hint else ""), kind=kind, name=name)


class Conflict(CacheError):
    """The object is not in a state that allows the request."""

    code = ErrorCode.CONFLICT


class LedgerBroken(AssertionError):
    """The daemon contradicts itself: a pin given back that was not held, a move that the table lacks.

    It ends the call as INTERNAL, is logged and counted; nothing that it left half-done may be served.
    """


class IllegalMove(LedgerBroken):
    """A copy or a page was asked to move against the table of legal moves."""

    def __init__(self, where: str, source: object, target: object) -> None:
        super().__init__(f"illegal move {source!s} -> {target!s} at {where}")
        self.where = where
        self.source = source
        self.target = target


class LeaseLost(CacheError):
    """The lease fell silent, was closed, or its process died."""

    code = ErrorCode.LEASE_LOST
    lease: str | None = None
    why: str | None = None

    def __init__(self, lease: str, why: str) -> None:
        super().__init__(
            f"lease {lease} is lost ({why}); recompute, open a new lease and attach again", lease=lease, why=why
        )


class NotOwned(CacheError):
    """The page or sequence is not the caller's."""

    code = ErrorCode.NOT_OWNED


class LoadFailed(CacheError):
    """A transfer the sequence relies on has failed: its pages hold nothing."""

    code = ErrorCode.LOAD_FAILED


class PoolExhausted(CacheError):
    """A pool cannot give what was asked. The fields say why, in pages. ``own``: those that the sequence which asks has
    there already, beside what is ``wanted``. ``reason``: ``full``, so that it may succeed later; or ``too large``: the
    pool can never hold it."""

    code = ErrorCode.EXHAUSTED
    pool: str | None = None
    wanted: int | None = None
    free: int | None = None
    evictable: int | None = None
    pinned: int | None = None
    quarantined: int | None = None
    capacity: int | None = None
    own: int | None = None
    reason: str | None = None

    def __init__(
        self,
        *,
        pool: str,
        wanted: int,
        free: int,
        evictable: int,
        pinned: int,
        quarantined: int,
        capacity: int,
        own: int = 0,
        remedy: str = "",
    ) -> None:
        is_too_large = wanted + own > capacity
        hint = f"it is full now: {remedy or 'release sequences, ask for fewer, or recompute'}"
        if is_too_large:
            advice = "the pool can never hold that; ask for fewer, or have the operator give the daemon a larger pool"
            hint = f"too large: {remedy or advice}"
        beside = f" beside {own} of its own" if own else ""
        counts = f"free {free}, evictable {evictable}, pinned or private {pinned}, quarantined {quarantined}"
        super().__init__(
            f"{pool}: wanted {wanted} pages{beside}, {counts}, capacity {capacity}; {hint}",
            pool=pool,
            wanted=wanted,
            free=free,
            evictable=evictable,
            pinned=pinned,
            quarantined=quarantined,
            capacity=capacity,
            own=own,
            reason="too large" if is_too_large else "full",
        )

    @property
    def can_never_fit(self) -> bool:
        """True where the pool is smaller than what was asked for: no wait and no release helps."""
        return self.capacity is not None and (self.wanted or 0) + (self.own or 0) > self.capacity


class LimitExceeded(CacheError):
    code = ErrorCode.LIMIT
    what: str | None = None
    got: int | None = None
    limit: int | None = None

    @classmethod
    def of_setting(cls, what: str, got: int, limit: int, setting: str, otherwise: str) -> LimitExceeded:
        """A limit that an operator sets while the daemon runs. ``otherwise``: what the caller can do without that."""
        return cls(what, got, limit, f"{otherwise}, or have the operator raise {setting} and reload")

    def __init__(self, what: str, got: int, limit: int, hint: str = "send less at a time") -> None:
        super().__init__(f"{what}: {got} is more than the limit of {limit}; {hint}", what=what, got=got, limit=limit)


class EventsMissed(CacheError):
    """Changes were missed that the daemon no longer knows; only a snapshot tells what is so now."""

    code = ErrorCode.GAP


class EventsForgotten(EventsMissed):
    """Changes from ``wanted`` on are asked for, and ``first`` is the oldest that is known."""

    wanted: int | None = None
    first: int | None = None

    def __init__(self, wanted: int, first: int) -> None:
        super().__init__(
            f"change {wanted} is no longer known, the oldest that is has number {first}; subscribe with a snapshot",
            wanted=wanted,
            first=first,
        )


class OtherEpoch(EventsMissed):
    """Changes of another life of the daemon are asked for."""

    wanted: int | None = None
    epoch: int | None = None

    def __init__(self, wanted: int, epoch: int) -> None:
        super().__init__(
            f"epoch {wanted} is over, this is epoch {epoch}; subscribe with a snapshot", wanted=wanted, epoch=epoch
        )


class SubscriberTooSlow(EventsMissed):
    """A subscriber did not take the changes as fast as they came, and was cut off."""

    code = ErrorCode.TOO_SLOW
    behind: int | None = None
    keep: int | None = None

    def __init__(self, behind: int, keep: int) -> None:
        super().__init__(
            f"the subscriber is {behind} changes behind, and {keep} are kept; subscribe anew with a snapshot, and take "
            "the answers off the stream before working on them",
            behind=behind,
            keep=keep,
        )


class QuotaExceeded(CacheError):
    """A tenant's quota is exceeded. ``got`` is None for a rate."""

    code = ErrorCode.QUOTA_EXCEEDED
    tenant: str | None = None
    what: str | None = None
    got: int | None = None
    limit: int | None = None

    def __init__(self, tenant: str, what: str, got: int | None, limit: int, hint: str) -> None:
        whose = f"tenant {tenant!r}" if tenant else "the shared tenant"
        asked = "asked more often" if got is None else f"{got} is more"
        super().__init__(
            f"quota {what} of {whose}: {asked} than the limit of {limit}; {hint}",
            tenant=tenant,
            what=what,
            got=got,
            limit=limit,
        )


class Unauthenticated(CacheError):
    """The call proves nothing about its caller, or its token is not known, revoked or expired.

    A client takes one as ``token=``, ``token_file=``, or from CACHESVC_TOKEN.
    """

    code = ErrorCode.UNAUTHENTICATED


class PermissionDenied(CacheError):
    """The caller is known, and its scopes do not allow the call."""

    code = ErrorCode.PERMISSION_DENIED


class NotSupported(CacheError):
    """Known by name, not built; a call that this daemon does not know; or memory that this process cannot map."""

    code = ErrorCode.UNSUPPORTED


class DeadlineExceeded(CacheError):
    """Timeout of a wait. ``was_answered``: the daemon said so itself, and nothing was changed; else the call may have
    taken effect."""

    code = ErrorCode.DEADLINE
    was_answered = False

    def __init__(self, message: str, *, was_answered: bool = False) -> None:
        super().__init__(message)
        self.was_answered = was_answered


class Unavailable(CacheError):
    """Something that is needed is not there, now or on this machine."""

    code = ErrorCode.UNAVAILABLE


class DaemonUnavailable(Unavailable):
    """The daemon is not there, went away, or is about to (``is_draining``)."""

    is_draining = False


class DaemonDraining(DaemonUnavailable):
    """The daemon lives and serves what is open, but opens nothing new: there is nothing to reconnect to yet."""

    code = ErrorCode.DRAINING
    is_draining = True


BY_CODE: dict[ErrorCode, type[CacheError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest,
        KeyMisplaced,
        NotFound,
        Conflict,
        LeaseLost,
        NotOwned,
        LoadFailed,
        PoolExhausted,
        LimitExceeded,
        EventsMissed,
        SubscriberTooSlow,
        QuotaExceeded,
        Unauthenticated,
        PermissionDenied,
        NotSupported,
        DeadlineExceeded,
        DaemonUnavailable,
        DaemonDraining,
    )
}
"""Meaning of a code for its receiver; for the raising side, its code is ``error.code``."""
