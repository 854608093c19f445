"""A lane over a rig: its other end sends whatever a test says, frames or not."""

from __future__ import annotations

import asyncio
import socket
from types import TracebackType
from typing import Any

from google.protobuf.message import Message
from kvcache.v1.cache_pb2 import MatchRequest, MatchResponse, OperationError
from kvcache.v1.lane_pb2 import LaneHello, LaneWelcome

from cachesvc.service.access.auth import Doorkeeper
from cachesvc.service.lane import Lanes
from cachesvc.wire.lane import CANCEL, ERROR, HELLO, METHODS, PING, VERSION, Frame, FrameReader, encode
from tests.unit.rigs.dispatch_rig import Desk
from tests.unit.rigs.ledger_rig import chain

PROCESS = b"process-of-a-lane"


class Peer:
    """A process's end of a lane."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.socket = end
        self._reader = FrameReader()
        self._tag = 100

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def frame(self) -> Frame | None:
        """The next frame; None at the lane's end."""
        while (frame := self._reader.next()) is None:
            try:
                count = await asyncio.get_running_loop().sock_recv_into(self.socket, self._reader.room())
            except ConnectionResetError:  # it ended with bytes of ours unread
                return None
            if not count:
                return None
            self._reader.add(count)
        return frame

    async def refusal(self) -> tuple[int, str]:
        """The next frame's tag, and the code of the error that it is."""
        frame = await self.frame()
        assert frame is not None
        assert frame.flags == ERROR
        return frame.tag, OperationError.FromString(frame.body).code

    async def hello(self, token: str = "", version: int = VERSION) -> LaneWelcome:
        await self.send(hello(token, version))
        frame = await self.frame()
        assert frame is not None
        assert (frame.method, frame.flags) == (HELLO, 0), OperationError.FromString(frame.body)
        return LaneWelcome.FromString(frame.body)

    async def ask(self, name: str, request: Message, answer: type[Message]) -> Any:
        """One call: its answer, or an OperationError."""
        self._tag += 1
        await self.send(call(name, self._tag, request))
        frame = await self.frame()
        assert frame is not None
        assert (frame.tag, frame.method) == (self._tag, METHODS[name])
        return (OperationError if frame.flags & ERROR else answer).FromString(frame.body)


def hello(token: str = "", version: int = VERSION, tag: int = 1) -> bytes:
    return encode(HELLO, 0, 0, tag, LaneHello(version=version, token=token).SerializeToString())


def call(name: str, tag: int, request: Message, *, flags: int = 0, deadline: int = 0) -> bytes:
    return encode(METHODS[name], flags, deadline, tag, request.SerializeToString())


class LaneSite:
    """A desk, its lanes, and one peer. ``async with`` it."""

    def __init__(self, desk: Desk | None = None, keeper: Doorkeeper | None = None, each: int = 8) -> None:
        self.desk = desk or Desk()
        self.lanes = Lanes(self.desk.dispatcher, self.desk.cache, keeper, None, each, 64)
        self.peers: list[Peer] = []

    def connect(self, process: bytes = PROCESS) -> Peer:
        self.peers.append(Peer(self.lanes.open(process)))
        return self.peers[-1]

    async def __aenter__(self) -> LaneSite:
        await self.desk.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lanes.close()
        for peer in self.peers:
            peer.socket.close()
        await self.desk.__aexit__(kind, error, trace)


async def greeted(site: LaneSite) -> Peer:
    peer = site.connect()
    await peer.hello()
    return peer


def matching(lease: str, sequence: int, prompt: str, request_id: int = 0) -> MatchRequest:
    keys = chain(*prompt)
    return MatchRequest(lease_id=lease, sequence_id=sequence, keys=keys, request_id=request_id)


class DaemonEnd:
    """The other end of a lane, as a test plays it."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._reader = FrameReader()

    def next(self) -> Frame | None:
        """The next frame; None at the end."""
        while (frame := self._reader.next()) is None:
            try:
                count = self.socket.recv_into(self._reader.room())
            except OSError:
                return None
            if not count:
                return None
            self._reader.add(count)
        return frame

    def take(self) -> Frame:
        frame = self.next()
        assert frame is not None
        return frame

    def greet(self) -> LaneHello:
        frame = self.take()
        assert frame.method == HELLO
        methods = [*METHODS.values(), CANCEL, HELLO, PING]
        welcome = LaneWelcome(version=VERSION, methods=methods)
        self.socket.sendall(encode(HELLO, 0, 0, frame.tag, welcome.SerializeToString()))
        return LaneHello.FromString(frame.body)

    def answer(self, frame: Frame, blocks: int = 0) -> None:
        body = MatchResponse(device_blocks=blocks).SerializeToString()
        self.socket.sendall(encode(frame.method, 0, 0, frame.tag, body))
