"""RPCs of the daemon that a client calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message
from kvcache.v1 import cache_pb2, engine_pb2, event_pb2, lease_pb2

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
