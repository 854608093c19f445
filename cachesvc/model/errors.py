"""What can go wrong, by name. Every error carries its facts as fields; the edge turns its code into a gRPC status.

CacheError
├── InvalidRequest        the request itself is wrong: fix it, do not retry
│   ├── LayoutRejected    a layout that cannot be built
│   └── KeyReused         an idempotency key came back with another request
├── NotFound              model, lease, sequence, replica or ticket is not known here
├── StateConflict         right request, wrong moment: the object is not in a state that allows it
│   ├── LeaseLost         the lease is over; nothing that it held may be published
│   ├── NotOwned          the page or sequence belongs to somebody else
│   └── LoadFailed        a transfer that the sequence relies on has failed
├── PoolExhausted         not enough pages, with the numbers
├── LimitExceeded         more than a configured limit
├── EventsForgotten       the changes that a subscriber asks for are no longer known: take a snapshot
├── OtherEpoch            the changes that a subscriber asks for are of an earlier life of the daemon: take a snapshot
├── TooSlow               a subscriber fell too far behind and was cut off: subscribe anew, with a snapshot
├── QuotaExceeded         more than the caller's tenant may have
├── Unauthenticated       nobody is known to be calling
├── PermissionDenied      the caller is known and may not do that
├── NotSupported          known by name, not built
└── Unavailable           draining or shutting down: go on without the cache

LedgerBroken              a bug of the daemon's own, outside of the tree: no caller did it, none can mend it
└── IllegalMove           a copy or a page was asked to move against its table
"""

from __future__ import annotations

from enum import Enum


class ErrorCode(Enum):
    """Stable names of the kinds of failure; ``cachesvc.wire.status`` maps each to a gRPC code."""

    INVALID = "INVALID"
    NOT_FOUND = "NOT_FOUND"
    CONFLICT = "CONFLICT"
    LEASE_LOST = "LEASE_LOST"
    NOT_OWNED = "NOT_OWNED"
    LOAD_FAILED = "LOAD_FAILED"
    EXHAUSTED = "EXHAUSTED"
    LIMIT = "LIMIT"
    UNSUPPORTED = "UNSUPPORTED"
    UNAVAILABLE = "UNAVAILABLE"
    GAP = "GAP"
    TOO_SLOW = "TOO_SLOW"
    DEADLINE = "DEADLINE"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"


class CacheError(Exception):
    """Base of every expected failure. ``str(error)`` says what was wrong and what to do."""

    code: ErrorCode = ErrorCode.INVALID


class InvalidRequest(CacheError):
    """The request is wrong in itself."""


class LayoutRejected(InvalidRequest):
    """A layout whose numbers contradict each other or exceed a limit."""


class KeyReused(InvalidRequest):
    """The idempotency key was used before for a different request."""

    def __init__(self, request_id: int) -> None:
        super().__init__(f"request_id {request_id} was used before for a different request; use a new id")
        self.request_id = request_id


class NotFound(CacheError):
    """Nothing is known under that name."""

    code = ErrorCode.NOT_FOUND

    def __init__(self, kind: str, name: object, hint: str = "") -> None:
        super().__init__(f"unknown {kind} {name!r}" + (f"; {hint}" if hint else ""))
        self.kind = kind
        self.name = name


class StateConflict(CacheError):
    """The object is not in a state that allows the request."""

    code = ErrorCode.CONFLICT


class LedgerBroken(AssertionError):
    """The daemon contradicts itself: a pin given back that nobody held, a move that the table lacks.

    It ends the call as INTERNAL, is logged and counted; nothing that it left half-done may be served.
    """


class IllegalMove(LedgerBroken):
    """A copy or a page was asked to move against the table of legal moves."""

    def __init__(self, where: str, source: object, target: object) -> None:
        super().__init__(f"illegal move {source!s} -> {target!s} at {where}")
        self.where = where
        self.source = source
        self.target = target


class LeaseLost(StateConflict):
    """The lease fell silent, was closed, or its process died."""

    code = ErrorCode.LEASE_LOST

    def __init__(self, lease: str, why: str) -> None:
        super().__init__(f"lease {lease} is lost ({why}); recompute, open a new lease and attach again")
        self.lease = lease
        self.why = why


class NotOwned(StateConflict):
    """The page or sequence is not the caller's."""

    code = ErrorCode.NOT_OWNED


class LoadFailed(StateConflict):
    """A transfer the sequence relies on has failed: its pages hold nothing."""

    code = ErrorCode.LOAD_FAILED


class PoolExhausted(CacheError):
    """A pool cannot give what was asked. The fields say why, in pages."""

    code = ErrorCode.EXHAUSTED

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
    ) -> None:
        super().__init__(
            f"{pool}: wanted {wanted} pages, free {free}, evictable {evictable}, pinned or private {pinned}, "
            f"quarantined {quarantined}, capacity {capacity}; release sequences, ask for fewer, or recompute"
        )
        self.pool = pool
        self.wanted = wanted
        self.free = free
        self.evictable = evictable
        self.pinned = pinned
        self.quarantined = quarantined
        self.capacity = capacity


class LimitExceeded(CacheError):
    """More than a configured limit."""

    code = ErrorCode.LIMIT

    def __init__(self, what: str, got: int, limit: int) -> None:
        super().__init__(f"{what}: {got} is more than the limit of {limit}; send less at a time")
        self.what = what
        self.got = got
        self.limit = limit


class EventsForgotten(CacheError):
    """Changes from ``wanted`` on are asked for, and ``first`` is the oldest that is known."""

    code = ErrorCode.GAP

    def __init__(self, wanted: int, first: int) -> None:
        super().__init__(
            f"change {wanted} is no longer known, the oldest that is has number {first}; subscribe with a snapshot"
        )
        self.wanted = wanted
        self.first = first


class OtherEpoch(CacheError):
    """Changes of another life of the daemon are asked for."""

    code = ErrorCode.GAP

    def __init__(self, wanted: int, epoch: int) -> None:
        super().__init__(f"epoch {wanted} is over, this is epoch {epoch}; subscribe with a snapshot")
        self.wanted = wanted
        self.epoch = epoch


class TooSlow(CacheError):
    """A subscriber did not take the changes as fast as they came."""

    code = ErrorCode.TOO_SLOW

    def __init__(self, behind: int, keep: int) -> None:
        super().__init__(
            f"the subscriber is {behind} changes behind, and {keep} are kept; subscribe anew with a snapshot, and take "
            "the answers off the stream before working on them"
        )
        self.behind = behind
        self.keep = keep


class QuotaExceeded(CacheError):
    """More than the tenant may have. ``got`` is None for a rate."""

    code = ErrorCode.QUOTA_EXCEEDED

    def __init__(self, tenant: str, what: str, got: int | None, limit: int, hint: str) -> None:
        whose = f"tenant {tenant!r}" if tenant else "the shared tenant"
        asked = "asked more often" if got is None else f"{got} is more"
        super().__init__(f"quota {what} of {whose}: {asked} than the limit of {limit}; {hint}")
        self.tenant = tenant
        self.what = what
        self.got = got
        self.limit = limit


class Unauthenticated(CacheError):
    """The call proves nothing about its caller, or the token is not known, revoked or expired."""

    code = ErrorCode.UNAUTHENTICATED


class PermissionDenied(CacheError):
    """The caller is known, and its scopes do not allow the call."""

    code = ErrorCode.PERMISSION_DENIED


class NotSupported(CacheError):
    """Known by name, not built in this release."""

    code = ErrorCode.UNSUPPORTED


class Unavailable(CacheError):
    """The daemon is draining or shutting down."""

    code = ErrorCode.UNAVAILABLE
