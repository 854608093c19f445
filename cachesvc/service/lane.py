"""One lane: reads frames on the event loop, hands each to the dispatcher in the same turn, and writes its answer.

    HELLO first; then calls in any order, each under a tag of its own until it is answered
    Steps of one lease one after another; what is answered at once needs no task and no future
    reading rests while too much has no answer, or while an answer waits for a peer that does not read

Whatever is no frame of the protocol is answered with an error, and ends the lane. Nothing is decided here of a call.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from google.protobuf.message import Message
from kvcache.v1 import cache_pb2
from kvcache.v1.cache_pb2 import OperationError
from kvcache.v1.lane_pb2 import LaneHello, LaneWelcome

from cachesvc.model.errors import CacheError, ErrorCode, InvalidRequest, LimitExceeded, NotSupported
from cachesvc.service.access.auth import EVERYONE, Caller, Doorkeeper, Unlocked, allow
from cachesvc.service.access.quota import FREE_BYTES
from cachesvc.service.calls.dispatcher import Dispatcher, Operation
from cachesvc.service.rpc.services import CacheService
from cachesvc.service.rpc.steps import OPERATIONS
from cachesvc.telemetry import events
from cachesvc.telemetry.tracing import Tracer
from cachesvc.wire.lane import (
    CANCEL,
    DEADLINE_UNIT_S,
    ERROR,
    HELLO,
    MAX_UNANSWERED_BYTES,
    MAX_UNANSWERED_FRAMES,
    METHODS,
    NO_ANSWER,
    PING,
    READ_BYTES,
    VERSION,
    Frame,
    FrameReader,
    encode,
)
from cachesvc.wire.parse import check_fields, parse
from cachesvc.wire.status import MAX_MESSAGE_BYTES, refusal

TURN_SECONDS = 0.25e-3
"""Length of a lane's turn, seconds, where more frames have come. To listen anew costs more than some calls."""


class Row(NamedTuple):
    """A call that the lane carries. ``is_step``: those of a lease keep their order, and go on without their caller."""

    operation: Operation[Any, Any]
    request: type[Message]
    is_step: bool = False
    may_be_silent: bool = False


@dataclass(slots=True)
class _Call:
    """A call without an answer. ``later``: None while it waits for an earlier Step."""

    size_bytes: int
    is_step: bool
    later: asyncio.Future[Any] | None = None


class Lane:
    """The daemon's end. ``process``: the life socket's token of the process."""

    def __init__(self, end: socket.socket, process: bytes, lanes: Lanes) -> None:
        self.process = process
        self.calls = 0
        self._socket = end
        self._lanes = lanes
        self._dispatcher = lanes.dispatcher
        self._party = lanes.party_of(process)
        self._reader = FrameReader(is_welcome=False)
        self._who: Caller | None = None
        self._waiting: dict[int, _Call] = {}
        self._waiting_bytes = 0
        self._steps: dict[str, deque[tuple[Frame, Any]]] = {}
        self._outbox = Outbox(end, self._emptied, self.close)
        self._is_listening = False
        self._is_closing = False
        self._is_closed = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        self._listen()

    @property
    def half_read_bytes(self) -> int:
        """Bytes kept for a long frame that has not come whole."""
        return self._reader.size_bytes if self._reader.size_bytes > READ_BYTES else 0

    def close(self, why: str) -> None:
        """End it. Steps under way go on: sent again they must find their answers. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._rest()
        self._outbox.close()
        self._socket.close()
        self._steps.clear()
        for call in self._waiting.values():
            if call.later is not None and not call.is_step:
                call.later.cancel()
        events.limited("lane_closed", self._party, reason=why, calls=self.calls)
        self._lanes.forget(self)

    # -- reading -----------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if not self._is_closed:
            self._is_listening = True
            self._loop.add_reader(self._socket, self._readable)

    def _rest(self) -> None:
        if self._is_listening:
            self._is_listening = False
            self._loop.remove_reader(self._socket)

    def _readable(self) -> None:
        try:
            count = self._socket.recv_into(self._reader.room())
        except BlockingIOError:
            return
        except OSError as error:
            self.close(f"it broke: {error.strerror}")
            return
        if not count:
            self.close("its process ended it")
            return
        self._reader.add(count)
        self._take()
        if self._reader.size_bytes > READ_BYTES and not self._is_closed:
            self._lanes.check_memory(self)

    def _take(self) -> None:
        """Carry out the frames that have come, for one turn."""
        until = self._dispatcher.node.loop_watch.begin() + TURN_SECONDS
        try:
            while self._has_room():
                frame = self._reader.next() if self._reader.end else None
                if frame is None:
                    if not self._is_listening:
                        self._listen()
                    return
                self._carry_out(frame)
                if self._reader.end and time.perf_counter() >= until:
                    self._rest()
                    self._loop.call_soon(self._take)
                    return
            self._rest()
        except LimitExceeded as too_long:
            self._break(0, too_long)
        except Exception:  # noqa: BLE001 - the root of a lane
            events.failure("lane_broke")
            self.close("a defect of the daemon")

    def _has_room(self) -> bool:
        return (
            len(self._waiting) < MAX_UNANSWERED_FRAMES
            and self._waiting_bytes < MAX_UNANSWERED_BYTES
            and not self._outbox.kept
            and not self._is_closing
            and not self._is_closed
        )

    # -- frames ------------------------------------------------------------------------------------------------

    def _carry_out(self, frame: Frame) -> None:
        number, who = frame.method, self._who
        row = self._lanes.rows.get(number)
        if who is None or row is None:
            self._serve_own(frame)
        elif frame.tag in self._waiting:
            self._break(frame.tag, InvalidRequest(f"the tag {frame.tag} is of a call without an answer; count them up"))
        elif frame.flags & ERROR or (frame.flags & NO_ANSWER and not row.may_be_silent):
            self._break(frame.tag, InvalidRequest("flags: only a Release does without its answer, and ERROR is ours"))
        else:
            self._serve(who, row, frame)

    def _serve_own(self, frame: Frame) -> None:
        """Serve frames that are no call: HELLO, PING, CANCEL; and refuse what is nothing of the protocol."""
        if frame.method == HELLO:
            self._greet(frame)
        elif self._who is None:
            self._break(frame.tag, InvalidRequest("a lane begins with HELLO"))
        elif frame.method == PING:
            self._send(encode(PING, 0, 0, frame.tag, b""))
        elif frame.method == CANCEL:
            call = self._waiting.get(frame.tag)
            if call is not None and call.later is not None and not call.is_step:
                call.later.cancel()
        else:
            self._break(frame.tag, NotSupported(f"method {frame.method} is not known; HELLO tells which are"))

    def _greet(self, frame: Frame) -> None:
        try:
            if self._who is not None:
                raise InvalidRequest("HELLO was said already")
            hello = parse(LaneHello, frame.body)
            check_fields(hello)
            if hello.version < 1:
                raise InvalidRequest("HELLO needs the version that its caller speaks, 1 or more")
            self._who = self._lanes.admit(hello.token, self.process)
            self._reader.welcome()
        except CacheError as refused:
            self._break(frame.tag, refused)
        else:
            welcome = LaneWelcome(
                version=min(hello.version, VERSION),
                methods=[*self._lanes.rows, CANCEL, HELLO, PING],
                epoch=self._dispatcher.node.epoch,
                frames=MAX_UNANSWERED_FRAMES,
                size_bytes=MAX_UNANSWERED_BYTES,
            )
            self._send(encode(HELLO, 0, 0, frame.tag, welcome.SerializeToString()))

    def _serve(self, who: Caller, row: Row, frame: Frame) -> None:
        self.calls += 1
        try:
            if len(frame.body) > FREE_BYTES:
                self._dispatcher.charge(who, len(frame.body))
            request: Any = parse(row.request, frame.body)
        except CacheError as unread:
            self._answer(frame, self._dispatcher.refuse(row.operation.name, unread))
            return
        if row.is_step and (behind := self._steps.get(request.lease_id)) is not None:
            self._wait(frame, _Call(len(frame.body), is_step=True))
            behind.append((frame, request))
        else:
            self._begin(who, row, frame, request)

    def _begin(self, who: Caller, row: Row, frame: Frame, request: Any) -> bool:
        """Carry out a call; True where it goes on by itself."""
        parent, tracer = None, self._lanes.tracer
        if tracer is not None and (frame.traceparent or tracer.begins_traces):
            parent = tracer.parent_of((("traceparent", frame.traceparent),) if frame.traceparent else ())
        served = self._dispatcher.serve(
            who,
            row.operation,
            request,
            process=lambda: self.process,
            contents=frame.body,
            seconds=frame.deadline * DEADLINE_UNIT_S if frame.deadline else None,
            parent=parent,
        )
        if not isinstance(served, asyncio.Future):
            self._answer(frame, served)
            return False
        self._wait(frame, _Call(len(frame.body), row.is_step, served))
        if row.is_step:
            self._steps.setdefault(request.lease_id, deque())
        served.add_done_callback(partial(self._done, row, frame, request))
        return True

    def _wait(self, frame: Frame, call: _Call) -> None:
        self._waiting[frame.tag] = call
        self._waiting_bytes += call.size_bytes

    def _end_waiting(self, frame: Frame) -> None:
        self._waiting_bytes -= self._waiting.pop(frame.tag).size_bytes

    def _done(self, row: Row, frame: Frame, request: Any, served: asyncio.Future[Any]) -> None:
        """A call that went on has ended, and with it the next Step of its lease may begin."""
        if self._is_closed:
            return
        self._end_waiting(frame)
        if not served.cancelled():
            self._answer(frame, served.result())
        if row.is_step:
            self._next_step(row, request.lease_id)
        elif not self._is_listening:
            self._take()

    def _next_step(self, row: Row, lease_id: str) -> None:
        """Serve the next waiting Step, in a turn of its own."""
        if self._is_closed or self._is_closing:
            return
        who, behind = self._who, self._steps[lease_id]
        assert who is not None
        if behind:
            frame, request = behind.popleft()
            self._end_waiting(frame)
            if not self._begin(who, row, frame, request):
                self._loop.call_soon(self._next_step, row, lease_id)
        else:
            del self._steps[lease_id]
        if not self._is_listening:
            self._take()

    # -- writing -----------------------------------------------------------------------------------------------

    def _answer(self, frame: Frame, outcome: Message) -> None:
        is_error = isinstance(outcome, OperationError)
        if not frame.flags & NO_ANSWER:
            body = outcome.SerializeToString()
            if len(body) > MAX_MESSAGE_BYTES:
                outcome, is_error = refusal(LimitExceeded("bytes of an answer", len(body), MAX_MESSAGE_BYTES)), True
                body = outcome.SerializeToString()
            self._send(encode(frame.method, ERROR if is_error else 0, 0, frame.tag, body))
        if isinstance(outcome, OperationError) and outcome.code == ErrorCode.UNAUTHENTICATED.value:
            self._close_soon("its token is not good any more")

    def _break(self, tag: int, error: CacheError) -> None:
        """Send what is wrong, and end the lane."""
        events.limited("lane_refused", self._party, reason=str(error))
        self._send(encode(0, ERROR, 0, tag, refusal(error).SerializeToString()))
        self._close_soon(error.code.value)

    def _close_soon(self, why: str) -> None:
        """Close once what was answered has gone out."""
        self._is_closing = True
        if not self._outbox.kept:
            self.close(why)

    def _send(self, data: bytes) -> None:
        if not self._is_closed:
            self._outbox.send(data)

    def _emptied(self) -> None:
        if self._is_closing:
            self.close("refused")
        else:
            self._take()


MOST_HALF_READ_BYTES = 64 << 20
"""Memory for frames that have not come whole, of all lanes of one process."""


class Lanes:
    """Made by ``open``, until their process ends them, is gone, or the daemon stops. ``each``: of one life connection;
    0: there are none; ``most``: in all. ``tracer``: finds the parent of a call's span."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        cache: CacheService,
        keeper: Doorkeeper | None,
        tracer: Tracer | None,
        each: int,
        most: int,
    ) -> None:
        self.each = each
        self.dispatcher = dispatcher
        self.rows = rows_of(cache)
        self.tracer = tracer
        self.party_of = dispatcher.node.party_of
        self._most = most
        self._calls = 0
        self._keeper = keeper or Unlocked(EVERYONE)
        self._lanes: dict[bytes, set[Lane]] = {}

    def open(self, process: bytes) -> socket.socket:
        """The other end of a new lane, for the process to have and this one to close.

        Raises NotSupported where there are none, LimitExceeded.
        """
        if not self.each:
            raise NotSupported("this daemon gives no lanes (lanes_per_process is 0); call by gRPC")
        lanes = self._lanes.setdefault(process, set())
        if len(lanes) >= self.each:
            raise LimitExceeded("lanes of this process", len(lanes) + 1, self.each)
        if self.count >= self._most:
            raise LimitExceeded("lanes", self.count + 1, self._most)
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        lane = Lane(own, process, self)
        lanes.add(lane)
        lane.start()
        events.limited("lane_opened", self.party_of(process), lanes=len(lanes))
        return theirs

    def end(self, process: bytes) -> None:
        """End the lanes of a process whose life connection, or which itself, has ended."""
        for lane in tuple(self._lanes.get(process, ())):
            lane.close("the life connection ended")
        self._lanes.pop(process, None)

    def close(self) -> None:
        for process in tuple(self._lanes):
            self.end(process)

    @property
    def count(self) -> int:
        return sum(map(len, self._lanes.values()))

    @property
    def calls(self) -> int:
        """Calls that came by lane, since the start."""
        return self._calls + sum(lane.calls for lanes in self._lanes.values() for lane in lanes)

    def admit(self, token: str, process: bytes) -> Caller:
        """The caller of a lane. Raises Unauthenticated, PermissionDenied."""
        return allow(self._keeper.find(token, process, ()), "/kvcache.v1.CacheService/lane")

    def check_memory(self, lane: Lane) -> None:
        """Close a lane whose process has too much half-read."""
        mine = self.party_of(lane.process)  # a process may have many life connections
        held = sum(
            each.half_read_bytes
            for process, lanes in self._lanes.items()
            if self.party_of(process) == mine
            for each in lanes
        )
        if held > MOST_HALF_READ_BYTES:
            lane.close(f"{held} bytes of frames that have not come whole, {MOST_HALF_READ_BYTES} are a process's part")

    def forget(self, lane: Lane) -> None:
        self._calls += lane.calls
        self._lanes[lane.process].discard(lane)


def rows_of(cache: CacheService) -> dict[int, Row]:
    """The calls of ``METHODS``, by their numbers."""
    rows: dict[int, Row] = {}
    operations: list[Operation[Any, Any]] = [cache.step, cache.wait_tickets]
    operations += [row for name, row in OPERATIONS.items() if name != "extend"]
    for operation in operations:
        name = operation.name.rpartition("/")[2]
        request = getattr(cache_pb2, f"{name}Request")
        rows[METHODS[name]] = Row(operation, request, is_step=name == "Step", may_be_silent=name == "Release")
    return rows


MAX_UNREAD_BYTES = 2 * MAX_MESSAGE_BYTES
"""Bytes kept for a peer that does not read, before its lane ends: calls in flight may be answered meanwhile."""


class Outbox:
    """Used on the event loop. ``emptied``: all that was kept has gone out; ``broke(why)``: nothing will any more.
    ``kept``: what the peer has not taken yet."""

    def __init__(self, end: socket.socket, emptied: Callable[..., None], broke: Callable[..., None]) -> None:
        self._socket = end
        self._emptied = emptied
        self._broke = broke
        self.kept = bytearray()

    def send(self, data: bytes) -> None:
        """Send bytes after those that are kept."""
        if self.kept:
            self.kept += data
            if len(self.kept) > MAX_UNREAD_BYTES:
                self._broke("its process does not read its answers")
            return
        sent = self._try(data)
        if 0 <= sent < len(data):
            self.kept += memoryview(data)[sent:]
            asyncio.get_running_loop().add_writer(self._socket, self._writable)

    def close(self) -> None:
        """Drop what is kept, and the callbacks: a lane and its outbox know each other, and their buffers would else
        wait for a full pass of the collector."""
        if self.kept:
            self.kept.clear()
            asyncio.get_running_loop().remove_writer(self._socket)
        self._emptied = self._broke = lambda *_: None

    def _writable(self) -> None:
        sent = self._try(self.kept)
        if sent < 0:
            return
        del self.kept[:sent]
        if not self.kept:
            asyncio.get_running_loop().remove_writer(self._socket)
            self._emptied()

    def _try(self, data: bytes | bytearray) -> int:
        """Bytes that the socket took; -1 where it broke."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._broke(f"it broke: {error.strerror}")
            return -1
