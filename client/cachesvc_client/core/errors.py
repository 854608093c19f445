"""Errors of the client: the tree of ``cachesvc.model.errors``, and those that only a client can raise.

CacheClientError              the same class as CacheError
├── InvalidRequest            the request itself is wrong: fix it, do not retry
│   ├── LayoutRejected        a layout that cannot be built
│   ├── KeyMisplaced          a key that is known below another block than the request says: chain the keys
│   ├── KeyReused             (the daemon's own: here it is an InvalidRequest)
│   ├── AlreadyClosed         a handle was used after its end, or ended twice
│   │   └── UsedAfterFork     a handle was used in a child of the process that made it
│   ├── NoSuchPlane           (also a KeyError) the layout has no plane of that layer and name
│   └── TokenFileUnreadable   the token file is missing, empty or torn: it may be whole a moment later
├── NotFound                  model, lease, sequence or ticket is not known to the daemon
├── Conflict                  right request, wrong moment: another call must come first
├── LeaseLost                 all that the lease held is gone: recompute, open a new lease
├── NotOwned                  the page or sequence belongs to another owner
├── LoadFailed                a load that the sequence relies on has failed: release it, match again, recompute
├── PoolExhausted             not enough pages: release, ask for fewer, or recompute
│   └── StockEmpty            no page in the client's own stock: allocate, or wait for the next step
├── LimitExceeded             more than a limit: send less at a time
├── EventsMissed              changes were missed that the daemon no longer knows: subscribe with a snapshot
│   ├── EventsForgotten       (the daemon's own: here it is an EventsMissed)
│   ├── OtherEpoch            (the daemon's own: here it is an EventsMissed)
│   └── SubscriberTooSlow     it fell too far behind and was cut off: subscribe anew with a snapshot
├── QuotaExceeded             more than this tenant may have: release, slow down, or go on without the cache
├── Unauthenticated           the daemon wants a token, or does not know this one
├── PermissionDenied          the token is good for something else
├── NotSupported              the daemon does not know the call, or this process cannot do what it would take
├── DeadlineExceeded          no answer in time; the call may or may not have taken effect
├── Unavailable               (the daemon's own: here it is a DaemonUnavailable)
│   └── DaemonUnavailable     not there, or connection lost: go on without the cache, and reconnect later
│       ├── DaemonDraining    it wants to go: finish what runs, open nothing, wait for the loss
│       └── UntrustedDaemon   another user serves its socket: no token was sent; name the daemon's user
├── GpuFailed                 a call of the GPU's driver failed: end the process if it goes on
└── DaemonFault               the daemon failed in a way that it has no name for: a bug, tell its operators

``error.code`` is the kind, ``str(error)`` says what was wrong and what to do.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError
from kvcache.v1.cache_pb2 import OperationError

from cachesvc.model.errors import (
    BY_CODE,
    CacheError,
    Conflict,
    DaemonDraining,
    DaemonUnavailable,
    DeadlineExceeded,
    ErrorCode,
    EventsMissed,
    InvalidRequest,
    KeyMisplaced,
    LayoutRejected,
    LeaseLost,
    LimitExceeded,
    LoadFailed,
    NotFound,
    NotOwned,
    NotSupported,
    PermissionDenied,
    PoolExhausted,
    QuotaExceeded,
    SubscriberTooSlow,
    Unauthenticated,
)
from cachesvc.model.layout import Layout
from cachesvc.wire.status import ERROR_FACTS_METADATA_KEY, ERROR_METADATA_KEY, GRPC_CODES, facts_of

__all__ = [
    "BY_CODE",
    "AlreadyClosed",
    "CacheClientError",
    "Conflict",
    "DaemonDraining",
    "DaemonFault",
    "DaemonUnavailable",
    "DeadlineExceeded",
    "ErrorCode",
    "EventsMissed",
    "GpuFailed",
    "InvalidRequest",
    "KeyMisplaced",
    "LayoutRejected",
    "LeaseLost",
    "LimitExceeded",
    "LoadFailed",
    "NoSuchPlane",
    "NotFound",
    "NotOwned",
    "NotSupported",
    "PermissionDenied",
    "PoolExhausted",
    "QuotaExceeded",
    "StockEmpty",
    "SubscriberTooSlow",
    "TokenFileUnreadable",
    "Unauthenticated",
    "UntrustedDaemon",
    "UsedAfterFork",
    "error_of",
    "is_refusal",
]

CacheClientError = CacheError
"""Base of all that the client raises on purpose."""


class AlreadyClosed(InvalidRequest):
    """A handle was used after its end, or ended twice."""


class UsedAfterFork(AlreadyClosed):
    """A handle was used in a child of the process that made it: connect after the fork."""


class NoSuchPlane(InvalidRequest, KeyError):
    """The pool has no plane of that layer and name, or two groups have one."""

    __str__ = Exception.__str__  # that of KeyError shows the repr of its message


class TokenFileUnreadable(InvalidRequest):
    """The token file is missing, empty or torn. Where it is being replaced, it is whole a moment later."""


class StockEmpty(PoolExhausted):
    """The client's own stock has no page left for some group."""


class UntrustedDaemon(DaemonUnavailable):
    """Another user than the daemon's serves its socket, so no token was sent there."""


class GpuFailed(CacheError):
    """The driver of the GPU refused a call that should work: its memory is full, or the process's context is broken.

    ``driver_code``: the driver's own number.
    """

    code = ErrorCode.UNAVAILABLE
    driver_code: int | None = None

    def __init__(self, message: str, driver_code: int) -> None:
        super().__init__(message)
        self.driver_code = driver_code


class DaemonFault(CacheError):
    """The daemon failed without a name for it."""

    code = ErrorCode.UNAVAILABLE


_BY_STATUS = {status: code for code, status in GRPC_CODES.items()}


def error_of(failure: grpc.RpcError | OperationError) -> CacheClientError:
    """The typed error for a failed call (sync or aio) or a failed operation of a step."""
    if isinstance(failure, grpc.RpcError):
        return _error_of_call(failure)
    return _named(failure.code, failure.message, facts_of(failure.facts)) or DaemonFault(
        f"{failure.code}: {failure.message}"
    )


def is_refusal(failure: grpc.RpcError) -> bool:
    """True when the daemon itself gave the failure, not the way to it."""
    return bool(_trailing(failure).get(ERROR_METADATA_KEY))


def _error_of_call(failure: grpc.RpcError) -> CacheClientError:
    is_call = isinstance(failure, grpc.Call | grpc.aio.AioRpcError)
    status, details = (failure.code(), failure.details() or "") if is_call else (None, str(failure))
    trailing = _trailing(failure)
    code, packed = trailing.get(ERROR_METADATA_KEY, ""), trailing.get(ERROR_FACTS_METADATA_KEY)
    facts: Mapping[str, int | str] = {}
    if isinstance(packed, bytes):
        with suppress(DecodeError):  # the code and the sentence are there
            facts = facts_of(OperationError.FromString(packed).facts)
    named = _named(code.decode() if isinstance(code, bytes) else code, details, facts)
    if named is not None:
        return named
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("no answer in time; the call may have taken effect")
    if status is grpc.StatusCode.OK:
        return DaemonUnavailable("the daemon ended the stream; go on without the cache and reconnect later")
    if status is grpc.StatusCode.CANCELLED or status is grpc.StatusCode.UNAVAILABLE:
        return DaemonUnavailable(f"no way to the daemon ({details}); go on without the cache and reconnect later")
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:  # gRPC's own: a message over the size limit
        return LimitExceeded.from_message(f"{details}; send less at a time")
    if status is not None and status in _BY_STATUS:
        return BY_CODE[_BY_STATUS[status]].from_message(details)
    return DaemonFault(f"{status.name if status is not None else 'no status'}: {details}")


def _named(code: str, message: str, facts: Mapping[str, int | str]) -> CacheClientError | None:
    if code not in {each.value for each in ErrorCode}:
        return None
    kind = BY_CODE[ErrorCode(code)]
    if kind is DeadlineExceeded:
        return DeadlineExceeded(message, was_answered=True)
    return kind.from_message(message, facts)


def _trailing(failure: grpc.RpcError) -> Mapping[str, str | bytes]:
    metadata: Any = isinstance(failure, grpc.Call | grpc.aio.AioRpcError) and failure.trailing_metadata()
    return dict(metadata or ())


# Handles belong to the process that made them: a child that was forked from it shares its sockets, and must neither
# speak for it nor end what it holds.


class Inherited(Protocol):
    """Resource that a child must not keep open."""

    def forget(self) -> None:
        """Close the child's copy, and nothing else."""


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()
_this = SimpleNamespace(pid=os.getpid())


def keep_from_children(handle: Inherited) -> None:
    """Close it in every child of this process: where no pidfd tells, the end of a connection is our own."""
    _inherited.add(handle)


def _begin_child() -> None:
    _this.pid = os.getpid()
    for handle in list(_inherited):
        handle.forget()


os.register_at_fork(after_in_child=_begin_child)


class Maker:
    """The process that made a handle. Each call of each handle asks: a comparison, where getpid is a system call."""

    def __init__(self) -> None:
        self._pid: int = _this.pid

    @property
    def is_elsewhere(self) -> bool:
        return bool(_this.pid != self._pid)

    def check(self) -> None:
        """Check the process. Raises UsedAfterFork in any other one."""
        if _this.pid != self._pid:
            raise UsedAfterFork(
                f"this handle of process {self._pid} was used in process {_this.pid}, which was forked from it; "
                "connect after the fork, with a client of its own"
            )


@dataclass(frozen=True)
class Registration:
    """A model's pools on one replica. Plain data: hand it to worker processes.

    ``namespace`` (32 bytes) is the root of every block key. ``device_pages[g]`` and ``host_pages[g]`` count the pages
    of each group's pool, in the layout's order, the first ``reserved_pages`` of which on the device are the engines'
    own. ``devices`` are UUIDs, one a rank. ``epoch`` changes whenever the daemon starts anew: what was registered in
    another epoch is gone. ``existed``: the pools were there, perhaps with blocks. ``peer_address``:
    where the daemon lends blocks to other nodes; empty: nowhere.
    """

    model_id: int
    replica: int
    namespace: bytes = field(repr=False)
    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]
    devices: tuple[str, ...]
    epoch: int
    layout: Layout
    existed: bool = False
    reserved_pages: int = 0
    weights_version: str = ""
    peer_address: str = ""

    @property
    def key(self) -> tuple[int, int]:
        """Model and replica, among those of one epoch."""
        return self.model_id, self.replica
