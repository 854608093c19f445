"""The seam between the client's protocol, which is written once as coroutines, and the two ways to wait for an answer.

On a ``BlockingPort`` what is awaited blocks the thread, so a coroutine runs to its end in one go (``drive``); on an
``AsyncPort`` it suspends on the event loop. The protocol itself knows neither threads nor tasks.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

import grpc
from google.protobuf.message import Message
from kvcache.v1 import cache_pb2, engine_pb2, event_pb2, lease_pb2

from cachesvc_client.core.errors import CacheClientError, DeadlineExceeded
from cachesvc_client.wire.credentials import Metadata

T = TypeVar("T")
Work = Coroutine[Any, Any, None]
"""Background work of a client."""

INTERRUPTS = (asyncio.CancelledError, KeyboardInterrupt)
"""Exceptions that may end a call half-way without its answer: it may have taken effect."""


class Nudge:
    """Value of ``Line.get`` after ``Line.wake``."""


NUDGE: Final = Nudge()


class ChannelClosed(grpc.RpcError):
    """A call met the end of its connection on this side."""


class StepLine(Protocol):
    """A stream of steps, by either way. ``metadata``: what it was opened with. ``is_lane``: it goes by a lane."""

    metadata: Metadata
    is_lane: bool

    def put(self, request: cache_pb2.StepRequest) -> None:
        """Send a step after those before it."""

    @property
    def is_silent(self) -> bool:
        """False where ``get`` may have something to tell at once."""

    async def get(self, deadline_s: float | None) -> Any:
        """The next answer, a grpc.RpcError for how the stream ended, or None at the deadline."""

    async def close(self) -> None:
        """End the stream."""


class Line(Protocol):
    """One stream both ways. ``metadata``: what it was opened with."""

    metadata: Metadata
    is_lane: bool

    @property
    def is_silent(self) -> bool:
        """False where ``get`` may have something to tell at once."""

    def put(self, request: Any) -> None:
        """Send a request after those before it."""

    async def get(self, deadline_s: float | None) -> Any:
        """The next answer, a grpc.RpcError for how the stream ended, NUDGE, or None at the deadline."""

    def wake(self) -> None:
        """End a wait in ``get``. From any thread of a blocking client."""

    async def close(self) -> None:
        """End the stream."""


class Running(Protocol):
    """Work that goes on by itself."""

    async def join(self) -> None:
        """Wait for its end, unless the work itself calls this."""


class Lanes(Protocol):
    """A port's way to send calls by a lane."""

    @property
    def has_lane(self) -> bool:
        """True while calls go by a lane."""

    async def take_lane(self, end: socket.socket, metadata: Metadata, timeout_s: float) -> None:
        """Send the calls that a lane carries by this one, which is the port's to close, in place of an earlier one.
        Raises DaemonUnavailable, grpc.RpcError: they go by the channel."""


class Port(Protocol):
    """Input and output of one connection."""

    def connect(self, socket_path: str) -> None:
        """Make the channel; it connects at the first call."""

    async def call(self, method: Method[Q, R], request: Q, timeout_s: float, metadata: Metadata) -> R:
        """Attempt a call once. Raises grpc.RpcError."""

    def open_line(self, method: Method[Q, R], metadata: Metadata) -> Line:
        """Open a stream. Raises ChannelClosed."""

    @property
    def lanes(self) -> Lanes | None:
        """Calls by a lane; None: this port has gRPC alone."""

    def open_steps(self, metadata: Metadata) -> StepLine:
        """Open a stream of steps, by the lane where there is one. Raises ChannelClosed."""

    async def wait_end(self, timeout_s: float | None) -> bool:
        """Wait until ``end_calls``; False when ``timeout_s`` passes first."""

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do what may block. An interrupt is raised once it has ended: what it made is the caller's to give back."""

    def spawn(self, work: Work, name: str) -> Running:
        """Begin work that goes on beside the caller."""

    def send_later(self, work: Work) -> None:
        """Do it soon, from any thread; at once where the caller may block."""

    async def settle(self) -> None:
        """Wait for all that was to be sent later."""

    def end_calls(self) -> None:
        """Calls under way fail now, not at their deadlines, and further ones at once. From any thread."""

    def tell(self, callback: Callable[[], None]) -> None:
        """Call an engine's callback where it expects it: in this thread, or on the loop."""

    async def close(self) -> None:
        """Close the channel. Idempotent."""


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
    """One request of a lease and what becomes of its answer: by itself or in a Step, blocking or awaited.

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
