"""RPCs of the daemon that a client calls, and what becomes of an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import Message
from kvcache.v1 import cache_pb2, engine_pb2, event_pb2, lease_pb2

from cachesvc_client.core.errors import CacheClientError, DeadlineExceeded

T = TypeVar("T")
Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[Q, R]):
    """One RPC. ``step_field``: name of the operation in a Step; empty where a Step cannot carry it."""

    service: str
    name: str
    request: type[Q]
    response: type[R]
    step_field: str = ""

    @property
    def path(self) -> str:
        return f"/kvcache.v1.{self.service}/{self.name}"


REGISTER = Method("EngineService", "Register", engine_pb2.RegisterRequest, engine_pb2.RegisterResponse)
ATTACH = Method("EngineService", "Attach", engine_pb2.AttachRequest, engine_pb2.AttachResponse)
DETACH = Method("EngineService", "Detach", engine_pb2.DetachRequest, engine_pb2.DetachResponse)
OPEN = Method("LeaseService", "Open", lease_pb2.OpenRequest, lease_pb2.OpenResponse)
KEEP_ALIVE = Method("LeaseService", "KeepAlive", lease_pb2.KeepAliveRequest, lease_pb2.KeepAliveResponse)
CLOSE = Method("LeaseService", "Close", lease_pb2.CloseRequest, lease_pb2.CloseResponse)
MATCH = Method("CacheService", "Match", cache_pb2.MatchRequest, cache_pb2.MatchResponse, "match")
ALLOCATE = Method("CacheService", "Allocate", cache_pb2.AllocateRequest, cache_pb2.AllocateResponse, "allocate")
PUBLISH = Method("CacheService", "Publish", cache_pb2.PublishRequest, cache_pb2.PublishResponse, "publish")
SWAP = Method("CacheService", "Swap", cache_pb2.SwapRequest, cache_pb2.SwapResponse, "swap")
RECYCLE = Method("CacheService", "Recycle", cache_pb2.RecycleRequest, cache_pb2.RecycleResponse, "recycle")
RELEASE = Method("CacheService", "Release", cache_pb2.ReleaseRequest, cache_pb2.ReleaseResponse, "release")
PREFETCH = Method("CacheService", "Prefetch", cache_pb2.PrefetchRequest, cache_pb2.PrefetchResponse, "prefetch")
WAIT_TICKETS = Method("CacheService", "WaitTickets", cache_pb2.WaitTicketsRequest, cache_pb2.WaitTicketsResponse)
STEP = Method("CacheService", "Step", cache_pb2.StepRequest, cache_pb2.StepResponse)

SUBSCRIBE = Method("EventService", "Subscribe", event_pb2.SubscribeRequest, event_pb2.SubscribeResponse)


@dataclass(slots=True)
class Operation(Generic[T]):
    """One request of a lease and what becomes of its answer: by itself or in a Step.

    ``request`` gets its lease_id and request_id when it is sent. ``apply`` takes the answer into the record of the
    sequence and returns what the caller sees; ``fail`` puts the record right after a refusal. One of the two is called,
    once. ``owner``: the sequence that it is for, if any. ``waits_s``: how long the daemon may wait before it answers,
    beside the time limit of the call, seconds.
    """

    method: Method[Any, Any]
    request: Any
    apply: Callable[[Any], T]
    fail: Callable[[CacheClientError], None]
    owner: Owner | None = None
    waits_s: float = 0.0

    def end_with(self, error: CacheClientError) -> None:
        """Note a failure. After a lost answer the owner keeps the operation, to ask again under the same id."""
        is_open = isinstance(error, DeadlineExceeded) and not error.was_answered
        if is_open and self.owner is not None:
            self.owner.unanswered = self
        else:
            self.fail(error)


class Owner(Protocol):
    """Owner of at most one operation whose answer never came."""

    unanswered: Operation[Any] | None


def no_action(_: CacheClientError) -> None:
    """No-op where a failure leaves nothing to put right."""
