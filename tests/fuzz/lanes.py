"""The share of the game that goes by lanes: the same bytes in frames, and frames that are none."""

from __future__ import annotations

import asyncio
import random
import socket
from typing import Any, NamedTuple

import grpc
from cachesvc_client.core.errors import DaemonUnavailable
from cachesvc_client.wire.credentials import Metadata
from cachesvc_client.wire.life import LifeConnection
from cachesvc_client.wire.methods import Method
from cachesvc_client.wire.transports import BlockingLane, encode_hello

from cachesvc.wire.lane import HEADER, METHODS, encode
from tests.fuzz.target import Rpc

SHARE = 0.4
"""Share of the calls that a lane carries."""
LIFE_SECONDS = 10.0


class Raw(NamedTuple):
    """Bytes in the place of a message."""

    raw: bytes

    def SerializeToString(self) -> bytes:
        return self.raw


class Lanes:
    """One lane for each token that calls are made with."""

    def __init__(self, socket_path: str) -> None:
        self._life = LifeConnection(socket_path, LIFE_SECONDS, lambda: None)
        self._lanes: dict[Metadata, BlockingLane] = {}
        self._opening = asyncio.Lock()

    def start(self) -> None:
        self._life.start()

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        self._life.close()

    def carries(self, rpc: Rpc) -> bool:
        return rpc.service.endswith("CacheService") and rpc.name in METHODS

    async def call(self, rpc: Rpc, raw: list[bytes], seconds: float, metadata: Metadata) -> list[Any]:
        """Send bytes as they are; the answers. Raises grpc.RpcError."""
        async with self._opening:
            lane = await self._lane(metadata)
        method: Method[Any, Any] = Method("CacheService", rpc.name, rpc.request, rpc.answer)
        messages: list[Any] = [Raw(each) for each in raw]
        return [await asyncio.to_thread(lane.call, method, each, seconds, ()) for each in messages]

    async def _lane(self, metadata: Metadata) -> BlockingLane:
        known = self._lanes.get(metadata)
        if known is not None and not known.why_broken:
            return known
        if known is not None:
            await asyncio.to_thread(known.close)
        lane = BlockingLane(self._life.fetch_lane())
        try:
            await asyncio.to_thread(lane.greet, metadata, LIFE_SECONDS)
        except DaemonUnavailable as refused:
            lane.close()
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.UNAUTHENTICATED, grpc.aio.Metadata(), grpc.aio.Metadata(), str(refused)
            ) from refused
        self._lanes[metadata] = lane
        return lane


def throw_frames(socket_path: str, rng: random.Random) -> None:
    """On a lane of one's own: noise, or frames of which a few bytes are noise, cut anywhere."""
    life = LifeConnection(socket_path, LIFE_SECONDS, lambda: None)
    life.start()
    try:
        with life.fetch_lane() as lane:
            sound = encode_hello(1, ()) + b"".join(
                encode(rng.randrange(14), rng.randrange(8), rng.randrange(3), tag, rng.randbytes(rng.randrange(90)))
                for tag in range(2, 12)
            )
            thrown = bytearray(sound if rng.random() < 0.7 else rng.randbytes(rng.randrange(1, 4 * HEADER.size)))
            for _ in range(rng.randrange(4)):
                thrown[rng.randrange(len(thrown))] = rng.randrange(256)
            try:
                lane.sendall(thrown[: rng.randrange(1, len(thrown) + 1)])
                lane.shutdown(socket.SHUT_WR)
                while lane.recv(4096):
                    pass
            except (BrokenPipeError, ConnectionResetError):
                return  # it hung up on us, as it should
    finally:
        life.close()
