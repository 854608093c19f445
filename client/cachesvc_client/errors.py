"""What a caller has to expect, by name.

CacheClientError
├── DaemonUnavailable     not there, connection lost, or draining: go on without the cache, and reconnect later
├── DeadlineExceeded      no answer in time; the call may or may not have taken effect
├── InvalidRequest        the request itself is wrong: fix it, do not retry
│   └── AlreadyClosed     a handle was used after its end, or ended twice
├── NotFound              model, lease, sequence or ticket is not known to the daemon
├── Conflict              right request, wrong moment: another call must come first
├── LeaseLost             all that the lease held is gone: recompute, open a new lease
├── NotOwned              the page or sequence belongs to somebody else
├── LoadFailed            a load that the sequence relies on has failed: release it, match again, recompute
├── PoolExhausted         not enough pages: release, ask for fewer, or recompute
│   └── StockEmpty        no page in the client's own stock: allocate, or wait for the next step
├── LimitExceeded         more than a limit: send less at a time
├── EventsMissed          changes were missed that the daemon no longer knows: subscribe with a snapshot
│   └── SubscriberTooSlow it fell too far behind and was cut off: subscribe anew with a snapshot
├── QuotaExceeded         more than this tenant may have: release, slow down, or go on without the cache
├── Unauthenticated       the daemon wants a token, or does not know this one
├── PermissionDenied      the token is good for something else
├── NotSupported          the daemon does not know the call, or this process cannot do what it would take
├── GpuFailed             a call of the GPU's driver failed: end the process if it goes on
└── DaemonFault           the daemon failed in a way that it has no name for: a bug, tell its operators

``error.code`` is the kind, ``str(error)`` says what was wrong and what to do. Keys and layouts are built without the
daemon and raise ``cachesvc.model.errors`` (InvalidRequest, LayoutRejected) of their own.
"""

from __future__ import annotations

from typing import Protocol

import grpc

from cachesvc.model.errors import ErrorCode
from cachesvc.wire.status import ERROR_METADATA_KEY, GRPC_CODES


class CacheClientError(Exception):
    """Base of all that the client raises on purpose."""

    code: ErrorCode = ErrorCode.UNAVAILABLE


class DaemonUnavailable(CacheClientError):
    """The daemon is not there, went away, or is draining. ``is_draining``: it answered, and said so."""

    def __init__(self, message: str, *, is_draining: bool = False) -> None:
        super().__init__(message)
        self.is_draining = is_draining


class DeadlineExceeded(CacheClientError):
    """No answer in time. ``was_answered``: the daemon itself gave up in time, so nothing was changed."""

    code = ErrorCode.DEADLINE

    def __init__(self, message: str, *, was_answered: bool = False) -> None:
        super().__init__(message)
        self.was_answered = was_answered


class InvalidRequest(CacheClientError):
    """The request is wrong in itself."""

    code = ErrorCode.INVALID


class AlreadyClosed(InvalidRequest):
    """A handle was used after its end, or ended twice."""


class NotFound(CacheClientError):
    """Nothing is known under that name."""

    code = ErrorCode.NOT_FOUND


class Conflict(CacheClientError):
    """The object is not in a state that allows the request."""

    code = ErrorCode.CONFLICT


class LeaseLost(CacheClientError):
    """The lease fell silent, was closed, or its process died."""

    code = ErrorCode.LEASE_LOST


class NotOwned(CacheClientError):
    """The page or sequence is not the caller's."""

    code = ErrorCode.NOT_OWNED


class LoadFailed(CacheClientError):
    """A transfer that the sequence relies on has failed: its pages hold nothing."""

    code = ErrorCode.LOAD_FAILED


class PoolExhausted(CacheClientError):
    """A pool cannot give what was asked; the message has the numbers."""

    code = ErrorCode.EXHAUSTED


class StockEmpty(PoolExhausted):
    """The client's own stock has no page left for some group."""


class LimitExceeded(CacheClientError):
    """More than a limit of the daemon or of the client."""

    code = ErrorCode.LIMIT


class EventsMissed(CacheClientError):
    """Changes were missed that the daemon no longer knows; only a snapshot tells what is so now."""

    code = ErrorCode.GAP


class SubscriberTooSlow(EventsMissed):
    """A subscriber did not take the changes as fast as they came, and was cut off."""

    code = ErrorCode.TOO_SLOW


class QuotaExceeded(CacheClientError):
    """More than this tenant may have; the message names the quota, what was asked and the limit."""

    code = ErrorCode.QUOTA_EXCEEDED


class Unauthenticated(CacheClientError):
    """The daemon wants a token (``token=``, ``token_file=``, CACHESVC_TOKEN), or does not know the one it got."""

    code = ErrorCode.UNAUTHENTICATED


class PermissionDenied(CacheClientError):
    """The daemon knows the caller, and its scopes do not allow this call."""

    code = ErrorCode.PERMISSION_DENIED


class NotSupported(CacheClientError):
    """Known by name, not built; a call that this daemon does not know; or memory that this process cannot map."""

    code = ErrorCode.UNSUPPORTED


class GpuFailed(CacheClientError):
    """The driver of the GPU refused a call that should work: its memory is full, or the process's context is broken.

    ``driver_code``: the driver's own number.
    """

    def __init__(self, message: str, driver_code: int) -> None:
        super().__init__(message)
        self.driver_code = driver_code


class DaemonFault(CacheClientError):
    """The daemon failed without a name for it."""


BY_CODE: dict[ErrorCode, type[CacheClientError]] = {
    ErrorCode.INVALID: InvalidRequest,
    ErrorCode.NOT_FOUND: NotFound,
    ErrorCode.CONFLICT: Conflict,
    ErrorCode.LEASE_LOST: LeaseLost,
    ErrorCode.NOT_OWNED: NotOwned,
    ErrorCode.LOAD_FAILED: LoadFailed,
    ErrorCode.EXHAUSTED: PoolExhausted,
    ErrorCode.LIMIT: LimitExceeded,
    ErrorCode.UNSUPPORTED: NotSupported,
    ErrorCode.UNAVAILABLE: DaemonUnavailable,
    ErrorCode.DEADLINE: DeadlineExceeded,
    ErrorCode.GAP: EventsMissed,
    ErrorCode.TOO_SLOW: SubscriberTooSlow,
    ErrorCode.UNAUTHENTICATED: Unauthenticated,
    ErrorCode.PERMISSION_DENIED: PermissionDenied,
    ErrorCode.QUOTA_EXCEEDED: QuotaExceeded,
}

_BY_STATUS = {status: code for code, status in GRPC_CODES.items()}


class OperationFailure(Protocol):
    """What a step says of an operation that failed (``kvcache.v1.OperationError``)."""

    @property
    def code(self) -> str:
        """Value of an ErrorCode."""

    @property
    def message(self) -> str:
        """What was wrong and what to do."""


def error_of(failure: grpc.RpcError | OperationFailure) -> CacheClientError:
    """The typed error for a failed call (sync or aio) or a failed operation of a step."""
    if isinstance(failure, grpc.RpcError):
        return _error_of_call(failure)
    return _named(failure.code, failure.message) or DaemonFault(f"{failure.code}: {failure.message}")


def is_refusal(failure: grpc.RpcError) -> bool:
    """True when the daemon itself gave the failure, not the way to it."""
    return bool(_named_code(failure))


def _error_of_call(failure: grpc.RpcError) -> CacheClientError:
    status, details = _status(failure), _details(failure)
    named = _named(_named_code(failure), details)
    if named is not None:
        return named
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("no answer in time; the call may have taken effect")
    if status is grpc.StatusCode.OK:
        return DaemonUnavailable("the daemon ended the stream; go on without the cache and reconnect later")
    if status is grpc.StatusCode.CANCELLED or status is grpc.StatusCode.UNAVAILABLE:
        return DaemonUnavailable(f"no way to the daemon ({details}); go on without the cache and reconnect later")
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:  # gRPC's own: a message over the size limit
        return LimitExceeded(f"{details}; send less at a time")
    if status is not None and status in _BY_STATUS:
        return BY_CODE[_BY_STATUS[status]](details)
    return DaemonFault(f"{status.name if status is not None else 'no status'}: {details}")


def _named(code: str, message: str) -> CacheClientError | None:
    if code not in {each.value for each in ErrorCode}:
        return None
    kind = ErrorCode(code)
    if kind is ErrorCode.UNAVAILABLE:
        return DaemonUnavailable(message, is_draining=True)
    if kind is ErrorCode.DEADLINE:
        return DeadlineExceeded(message, was_answered=True)
    return BY_CODE[kind](message)


def _status(failure: grpc.RpcError) -> grpc.StatusCode | None:
    if isinstance(failure, grpc.Call | grpc.aio.AioRpcError):
        return failure.code()
    return None


def _details(failure: grpc.RpcError) -> str:
    if isinstance(failure, grpc.Call | grpc.aio.AioRpcError):
        return failure.details() or ""
    return str(failure)


def _named_code(failure: grpc.RpcError) -> str:
    if isinstance(failure, grpc.Call | grpc.aio.AioRpcError):
        for key, value in failure.trailing_metadata() or ():
            if key == ERROR_METADATA_KEY:
                return value.decode() if isinstance(value, bytes) else value
    return ""
