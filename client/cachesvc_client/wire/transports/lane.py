"""A lane as the client has it: tags, frames and how it ends. ``blocking_lane`` reads and writes it.

Tags distinguish calls. What is not answered any more fails as a call of gRPC does, so that retries, errors and
losses are those of the protocol, whichever way a call took.
"""

from __future__ import annotations

import itertools
import socket
from collections import deque
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from kvcache.v1.cache_pb2 import OperationError, StepRequest, StepResponse
from kvcache.v1.lane_pb2 import LaneHello, LaneWelcome

from cachesvc.model.errors import ErrorCode
from cachesvc.wire.lane import (
    CANCEL,
    DEADLINE_UNIT_S,
    ERROR,
    HELLO,
    MAX_UNANSWERED_FRAMES,
    METHODS,
    MOST_DEADLINE,
    VERSION,
    Frame,
    FrameReader,
    encode,
)
from cachesvc.wire.refusals import status_metadata
from cachesvc.wire.status import AUTHORIZATION_METADATA_KEY, BEARER, GRPC_CODES, MAX_MESSAGE_BYTES
from cachesvc_client.core.errors import DaemonUnavailable, error_of
from cachesvc_client.wire.credentials import Metadata
from cachesvc_client.wire.methods import STEP, Method

KEPT_FOR_STEPS = 4
"""Frames without an answer that calls which may wait leave to Steps; beyond, such a call goes by gRPC."""
ENDS_STREAM = frozenset({"INTERNAL", ErrorCode.UNAUTHENTICATED.value})
"""Refusals of a Step that gRPC has for its whole stream."""

_STEP = METHODS["Step"]
_STATUSES = {code.value: status for code, status in GRPC_CODES.items()}


class Inbox:
    """Answers that one caller waits for, in the order in which they came. ``tags``: those that are still to come."""

    __slots__ = ("came", "tags")

    def __init__(self) -> None:
        self.came: deque[Frame] = deque()
        self.tags: set[int] = set()


class LaneEnd:
    """State of a client's end: tags, frames and the end's cause. ``why_broken``: empty while it is open."""

    def __init__(self, end: socket.socket) -> None:
        self.why_broken = ""
        self._socket = end
        self._reader = FrameReader()
        self._tags = itertools.count(1)
        self._inboxes: dict[int, Inbox] = {}

    @property
    def has_room(self) -> bool:
        """True when a call may go this way."""
        return not self.why_broken and len(self._inboxes) < MAX_UNANSWERED_FRAMES - KEPT_FOR_STEPS

    def forget(self) -> None:
        """Forget the lane in a child of this process: it is the parent's."""
        self._socket.close()

    def _enter(self, inbox: Inbox) -> int:
        """A tag for a call whose answer goes to this inbox."""
        tag = next(self._tags)
        inbox.tags.add(tag)
        self._inboxes[tag] = inbox
        return tag

    def leave(self, inbox: Inbox) -> None:
        """Drop the waiter of these answers; what was asked for goes on."""
        self._leave(inbox, tuple(inbox.tags))

    def _leave(self, inbox: Inbox, tags: tuple[int, ...]) -> None:
        for tag in tags:
            self._inboxes.pop(tag, None)
            inbox.tags.discard(tag)

    def _encode_step(self, request: StepRequest, inbox: Inbox, sent: SentSteps) -> bytes:
        """A step as a frame; empty for one that is too large, which has its refusal in the inbox."""
        tag, body = self._enter(inbox), request.SerializeToString()
        sent.ids[tag] = request.request_id
        if len(body) <= MAX_MESSAGE_BYTES:
            return encode(_STEP, 0, 0, tag, body, sent.traceparent)
        error = OperationError(code=ErrorCode.LIMIT.value, message=str(error_of(_too_large(body))))
        self._leave(inbox, (tag,))
        inbox.came.append(Frame(_STEP, ERROR, 0, tag, error.SerializeToString()))
        return b""

    def _hand_out(self, mine: Inbox | None) -> bool:
        """Hand arrived answers to their waiters; True where some of them are not ``mine``. Raises LimitExceeded."""
        is_others = False
        while self._reader.end and (frame := self._reader.next()) is not None:
            inbox = self._inboxes.pop(frame.tag, None)
            if inbox is not None:  # else its caller has given it up
                inbox.tags.discard(frame.tag)
                inbox.came.append(frame)
                is_others = is_others or inbox is not mine
        return is_others

    def _broke(self) -> grpc.RpcError:
        """Error of a broken lane, as of a broken gRPC call: the call may be sent again by another way."""
        return failure(grpc.StatusCode.UNAVAILABLE, f"the lane ended: {self.why_broken}")


def number_of(method: Method[Any, Any]) -> int:
    """The call's number in frames; 0 where it goes by gRPC alone."""
    return METHODS.get(method.name, 0) if method.service == "CacheService" else 0


def encode_call(number: int, tag: int, request: Any, timeout_s: float | None, metadata: Metadata) -> bytes:
    """A call as a frame. Raises grpc.RpcError for one that is too large."""
    body = request.SerializeToString()
    if len(body) > MAX_MESSAGE_BYTES:
        raise _too_large(body)
    units = 0 if timeout_s is None else min(int(timeout_s / DEADLINE_UNIT_S) + 1, MOST_DEADLINE)
    return encode(number, 0, units, tag, body, _traceparent(metadata) if metadata else "")


def encode_cancel(tag: int) -> bytes:
    """Encode a frame that cancels this call."""
    return encode(CANCEL, 0, 0, tag, b"")


def encode_hello(tag: int, metadata: Metadata) -> bytes:
    """The first frame, with the credentials of the calls' metadata."""
    shown = dict(metadata).get(AUTHORIZATION_METADATA_KEY, "")
    token = shown.removeprefix(BEARER) if isinstance(shown, str) else ""
    return encode(HELLO, 0, 0, tag, LaneHello(version=VERSION, token=token).SerializeToString())


def check_welcome(frame: Frame) -> None:
    """Raises DaemonUnavailable where the daemon does not let this lane in, or speaks otherwise."""
    if frame.flags & ERROR:
        raise DaemonUnavailable(f"the daemon refused the lane: {OperationError.FromString(frame.body).message}")
    welcome = LaneWelcome.FromString(frame.body)
    if welcome.version != VERSION or not set(METHODS.values()) <= set(welcome.methods):
        raise DaemonUnavailable(f"the daemon's lane has version {welcome.version}, this client has {VERSION}")


def read_answer(method: Method[Any, Any], frame: Frame) -> Any:
    """The answer in a frame. Raises grpc.RpcError for a refusal."""
    if frame.flags & ERROR:
        raise refused(OperationError.FromString(frame.body))
    try:
        return method.response.FromString(frame.body)
    except DecodeError as unread:
        raise failure(grpc.StatusCode.INTERNAL, f"the answer is not a message of {method.name}") from unread


def _too_large(body: bytes) -> grpc.RpcError:
    """Error of gRPC for a message that is too large to send."""
    why = f"a message larger than max ({len(body)} vs. {MAX_MESSAGE_BYTES} bytes)"
    return failure(grpc.StatusCode.RESOURCE_EXHAUSTED, why)


def late() -> grpc.RpcError:
    """Error of a call without an answer in time."""
    return failure(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time")


def refused(error: OperationError) -> grpc.RpcError:
    """A refusal as gRPC tells it: by a status, and its name in the trailing metadata."""
    status = _STATUSES.get(error.code)
    if status is None:
        return failure(grpc.StatusCode.INTERNAL, error.message)
    named = grpc.aio.Metadata(*status_metadata(error))
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), named, error.message)


def failure(status: grpc.StatusCode, details: str) -> grpc.RpcError:
    """Error of a call that the daemon did not answer."""
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class SentSteps:
    """The steps of one stream: their ``ids`` by tag, for an answer that is a refusal has to name the request."""

    def __init__(self, metadata: Metadata) -> None:
        self.ids: dict[int, int] = {}
        self.traceparent = _traceparent(metadata)

    def read(self, frame: Frame) -> StepResponse | grpc.RpcError:
        """An answer as the stream of gRPC has it: a refused step is an answer, unless it ends the stream."""
        request_id = self.ids.pop(frame.tag)
        if frame.flags & ERROR:
            error = OperationError.FromString(frame.body)
            return refused(error) if error.code in ENDS_STREAM else StepResponse(request_id=request_id, error=error)
        try:
            answer: StepResponse = read_answer(STEP, frame)
        except grpc.RpcError as unread:
            return unread
        return answer


def _traceparent(metadata: Metadata) -> str:
    for key, value in metadata:
        if key == "traceparent" and isinstance(value, str):
            return value
    return ""
