"""The lanes of all processes: opened for processes that the life socket knows, ended with their life connections."""

from __future__ import annotations

import socket

from kvcache.v1 import cache_pb2

from cachesvc.model.errors import LimitExceeded, NotSupported
from cachesvc.service.access.auth import Caller, Doorkeeper, allow, find_caller, otherwise_local, scopes_of
from cachesvc.service.calls.dispatcher import Dispatcher
from cachesvc.service.lane.lane import Lane, LaneContext, Row
from cachesvc.service.rpc.cache_service import CacheService
from cachesvc.telemetry import events
from cachesvc.telemetry.tracing import Tracer
from cachesvc.wire.lane import METHODS

SCOPES = scopes_of("/kvcache.v1.CacheService/Step")


MOST_HALF_READ_BYTES = 64 << 20
"""Memory for frames that have not come whole, of all lanes of one process."""


class Lanes:
    """Made by ``open``, until their process ends them, is gone, or the daemon stops. ``each``: of one life connection;
    0: there are none; ``most``: in all. ``calls`` that came by lanes that have ended."""

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
        self._most = most
        self._calls = 0
        self._keeper = keeper
        self._party = dispatcher.node.party_of
        self._lanes: dict[bytes, set[Lane]] = {}
        self._context = LaneContext(
            dispatcher, rows_of(cache), self._admit, dispatcher.node.epoch, tracer, self._check_memory
        )

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
        lane = Lane(own, process, self._context, self._forget)
        lanes.add(lane)
        lane.start()
        if (unlogged := events.admit("lane_opened", self._party(process))) is not None:
            events.event("lane_opened", lanes=len(lanes), unlogged=unlogged)
        return theirs

    def end(self, process: bytes) -> None:
        """End the lanes of a process whose life connection, or which itself, has ended."""
        for lane in tuple(self._lanes.get(process, ())):
            lane.close("the life connection ended")
        self._lanes.pop(process, None)

    def close(self) -> None:
        """End all lanes."""
        for process in tuple(self._lanes):
            self.end(process)

    @property
    def count(self) -> int:
        """Lanes that are open."""
        return sum(map(len, self._lanes.values()))

    @property
    def calls(self) -> int:
        """Calls that came by lane, since the start."""
        return self._calls + sum(lane.calls for lanes in self._lanes.values() for lane in lanes)

    def _admit(self, token: str, process: bytes) -> Caller:
        found = find_caller(self._keeper, token, process)
        return allow(found or otherwise_local(self._keeper), SCOPES, "/kvcache.v1.CacheService/lane")

    def _check_memory(self, lane: Lane) -> None:
        mine = self._party(lane.process)  # a process may have many life connections
        held = sum(
            each.half_read_bytes
            for process, lanes in self._lanes.items()
            if self._party(process) == mine
            for each in lanes
        )
        if held > MOST_HALF_READ_BYTES:
            lane.close(f"{held} bytes of frames that have not come whole, {MOST_HALF_READ_BYTES} are a process's part")

    def _forget(self, lane: Lane) -> None:
        self._calls += lane.calls
        self._lanes[lane.process].discard(lane)


def rows_of(cache: CacheService) -> dict[int, Row]:
    """Calls by their numbers in frames."""
    return {
        METHODS["Step"]: Row(cache.step, cache_pb2.StepRequest, is_step=True),
        METHODS["Match"]: Row(cache.match, cache_pb2.MatchRequest),
        METHODS["Allocate"]: Row(cache.allocate, cache_pb2.AllocateRequest),
        METHODS["Publish"]: Row(cache.publish, cache_pb2.PublishRequest),
        METHODS["Release"]: Row(cache.release, cache_pb2.ReleaseRequest, may_be_silent=True),
        METHODS["Recycle"]: Row(cache.recycle, cache_pb2.RecycleRequest),
        METHODS["Swap"]: Row(cache.swap, cache_pb2.SwapRequest),
        METHODS["Prefetch"]: Row(cache.prefetch, cache_pb2.PrefetchRequest),
        METHODS["WaitTickets"]: Row(cache.wait_tickets, cache_pb2.WaitTicketsRequest),
    }
