"""A daemon at the channel seam: real sockets, real gRPC, and answers that a test chooses."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from kvcache.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    common_pb2,
    engine_pb2,
    engine_pb2_grpc,
    lease_pb2,
    lease_pb2_grpc,
)

from cachesvc.memory.extents import map_memfd, sealed_memfd
from cachesvc.memory.timeline import MappedSheet
from cachesvc.model.errors import ErrorCode
from cachesvc.model.layout import Layout, device_geometry
from cachesvc.wire.convert import layout_from_proto, pack_numbers, pack_pages, placements_to_proto
from cachesvc.wire.lane import LANE_QUESTION
from cachesvc.wire.status import ERROR_METADATA_KEY, GRPC_CODES, LIFE_GREETING, LIFE_SUFFIX
from tests.step_operations import with_columns, without_columns

TOKEN = b"0123456789abcdef"
EPOCH = 7
PAGES = 8
LEASE_ID = "lease-1"

Fault = Callable[[grpc.ServicerContext], None]
"""Done to one call before it is answered."""


def break_way(context: grpc.ServicerContext) -> None:
    """Fail like a connection that was reset: UNAVAILABLE, and no word of the daemon's own."""
    context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")


def lose_answer(context: grpc.ServicerContext) -> None:
    """Fail like a deadline that passed on the way: the outcome of the call is unknown."""
    context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


def refuse(code: ErrorCode, message: str = "no") -> Fault:
    """Fail like the daemon does."""

    def fault(context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata(((ERROR_METADATA_KEY, code.value),))
        context.abort(GRPC_CODES[code], message)

    return fault


def hang_until(event: threading.Event, arrived: threading.Event | None = None) -> Fault:
    """Answer only once ``event`` is set; ``arrived`` tells that the call is there."""

    def fault(context: grpc.ServicerContext) -> None:
        if arrived is not None:
            arrived.set()
        event.wait(30)

    return fault


class FakeDaemon:
    """Serves until ``close``. ``faults[rpc]`` are done to the next calls, ``seen[rpc]`` are the requests that came.
    ``is_asked`` for a descriptor it gives it once ``may_give`` is set. ``lane`` serves the daemon's end of
    each lane; without it there are none. ``loads``: tickets of each Allocate and Swap; ``ended``: of each
    wait for tickets."""

    def __init__(self, folder: Path, *, silence_limit_ms: int = 30_000, epoch: int = EPOCH) -> None:
        self.path = str(folder / "kv.sock")
        self.epoch = epoch
        self.silence_limit_ms = silence_limit_ms
        self.faults: dict[str, deque[Fault]] = defaultdict(deque)
        self.seen: dict[str, list[Any]] = defaultdict(list)
        self.knows_columns = True
        self.step_answers: deque[cache_pb2.StepResponse] = deque()
        self.beats = threading.Semaphore(0)
        self.draining = False
        self.token_grace_ms: Callable[[dict[str, Any]], int] = lambda _shown: 0
        self.knows_instances = True
        self.first_id = 0
        self.layout: Layout | None = None
        self.memory_kind = "memfd"
        self.timeline = MappedSheet(64, is_shared=True)
        self.timeline.seal()
        self.slab_fds: list[int] = []
        self.is_asked = threading.Event()
        self.loads: list[common_pb2.Ticket] = []
        self.ended: list[common_pb2.Ticket] = []
        self.may_give = threading.Event()
        self.may_give.set()
        self.lane: Callable[[socket.socket], None] | None = None
        self._server = grpc.server(futures.ThreadPoolExecutor(16))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._peers: list[socket.socket] = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)

    def start(self) -> None:
        self._listener.bind(self.path + LIFE_SUFFIX)
        self._listener.listen()
        self._acceptor.start()
        engine_pb2_grpc.add_EngineServiceServicer_to_server(_Engine(self), self._server)
        lease_pb2_grpc.add_LeaseServiceServicer_to_server(_Lease(self), self._server)
        cache_pb2_grpc.add_CacheServiceServicer_to_server(_Cache(self), self._server)
        self._server.add_insecure_port(f"unix:{self.path}")
        self._server.start()

    def close(self) -> None:
        """Gone at once, as after a kill."""
        self.hang_up()
        self.let_go()
        self.timeline.close()
        for descriptor in self.slab_fds:
            os.close(descriptor)
        self.slab_fds.clear()

    def let_go(self) -> None:
        """Serve no more, as in an orderly stop: the life connections stand still."""
        if self._listener.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        for name in (self.path, self.path + LIFE_SUFFIX):
            Path(name).unlink(missing_ok=True)
        self._server.stop(None).wait()

    def hang_up(self) -> None:
        """End the life connections alone."""
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()
        self._peers.clear()

    def enter(self, rpc: str, request: Any, context: grpc.ServicerContext) -> None:
        """Note a call, then do to it what the test wants."""
        self.seen[rpc].append(request)
        if self.faults[rpc]:
            self.faults[rpc].popleft()(context)

    def slab(self, group: int) -> memoryview:
        """The bytes of a group, as the daemon sees them."""
        assert self.layout is not None
        return map_memfd(self.slab_fds[group], device_geometry(self.layout, group, PAGES).total_bytes)

    def attached(self) -> engine_pb2.AttachResponse:
        assert self.layout is not None
        slabs = []
        for group in range(len(self.layout.groups)):
            geometry = device_geometry(self.layout, group, PAGES)
            if group == len(self.slab_fds):
                self.slab_fds.append(sealed_memfd("slab", geometry.total_bytes))
            handle = common_pb2.MemoryHandle(
                kind=self.memory_kind, token=slab_token(group), size_bytes=geometry.total_bytes
            )
            placements = placements_to_proto(geometry)
            slabs.append(engine_pb2.GroupSlab(group=group, pages=PAGES, handle=handle, planes=placements))
        shown = self.timeline.handle
        words = common_pb2.MemoryHandle(kind=shown.kind, token=shown.token, size_bytes=shown.size_bytes)
        return engine_pb2.AttachResponse(device="shm-0", slabs=slabs, timeline=words)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                peer.send(LIFE_GREETING + TOKEN + struct.pack("<Q", self.epoch))
                self._peers.append(peer)
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _give_lane(self, peer: socket.socket) -> None:
        if self.lane is None:
            peer.send(b"NO: no lanes here")
            return
        own, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(peer, [b"OK"], [theirs.fileno()])
        threading.Thread(target=self.lane, args=(own,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while message := peer.recv(64):
                if message == LANE_QUESTION:
                    self._give_lane(peer)
                    continue
                self.is_asked.set()
                self.may_give.wait(30)
                known: dict[bytes, int | None] = {self.timeline.handle.token: self.timeline.fd}
                known |= {slab_token(group): fd for group, fd in enumerate(self.slab_fds)}
                descriptor = known.get(message[2:])
                if descriptor is None:
                    peer.send(b"NO: unknown token")
                else:
                    socket.send_fds(peer, [b"OK"], [descriptor])


class _Engine(engine_pb2_grpc.EngineServiceServicer):
    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon

    def Register(self, request: engine_pb2.RegisterRequest, context: Any) -> engine_pb2.RegisterResponse:
        self._daemon.enter("Register", request, context)
        self._daemon.layout = layout_from_proto(request.layout)
        return engine_pb2.RegisterResponse(
            model_id=1, namespace=b"n" * 32, device_pages=[PAGES], devices=["shm-0"], epoch=self._daemon.epoch
        )

    def Attach(self, request: engine_pb2.AttachRequest, context: Any) -> engine_pb2.AttachResponse:
        self._daemon.enter("Attach", request, context)
        return self._daemon.attached()

    def Detach(self, request: engine_pb2.DetachRequest, context: Any) -> engine_pb2.DetachResponse:
        self._daemon.enter("Detach", request, context)
        return engine_pb2.DetachResponse()


class _Lease(lease_pb2_grpc.LeaseServiceServicer):
    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon

    def Open(self, request: lease_pb2.OpenRequest, context: Any) -> lease_pb2.OpenResponse:
        self._daemon.enter("Open", request, context)
        return lease_pb2.OpenResponse(
            lease_id=LEASE_ID,
            silence_limit_ms=self._daemon.silence_limit_ms,
            epoch=self._daemon.epoch,
            instance_id=request.instance_id if self._daemon.knows_instances else "",
            first_id=self._daemon.first_id,
            joined=self._daemon.first_id > 0,
            step_columns=self._daemon.knows_columns,
        )

    def KeepAlive(self, request_iterator: Any, context: Any) -> Iterator[lease_pb2.KeepAliveResponse]:
        for request in request_iterator:
            self._daemon.enter("KeepAlive", request, context)
            yield lease_pb2.KeepAliveResponse(
                lease_id=request.lease_id,
                epoch=self._daemon.epoch,
                draining=self._daemon.draining,
                token_grace_ms=self._daemon.token_grace_ms(dict(context.invocation_metadata())),
            )
            self._daemon.beats.release()

    def Close(self, request: lease_pb2.CloseRequest, context: Any) -> lease_pb2.CloseResponse:
        self._daemon.enter("Close", request, context)
        return lease_pb2.CloseResponse()


class _Cache(cache_pb2_grpc.CacheServiceServicer):
    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon

    def Match(self, request: cache_pb2.MatchRequest, context: Any) -> cache_pb2.MatchResponse:
        self._daemon.enter("Match", request, context)
        return cache_pb2.MatchResponse()

    def Allocate(self, request: cache_pb2.AllocateRequest, context: Any) -> cache_pb2.AllocateResponse:
        self._daemon.enter("Allocate", request, context)
        return cache_pb2.AllocateResponse(tables=[cells(0, range(request.blocks))], tickets=self._daemon.loads)

    def Publish(self, request: cache_pb2.PublishRequest, context: Any) -> cache_pb2.PublishResponse:
        self._daemon.enter("Publish", request, context)
        return cache_pb2.PublishResponse(sealed_blocks=request.first_block + request.blocks)

    def Swap(self, request: cache_pb2.SwapRequest, context: Any) -> cache_pb2.SwapResponse:
        self._daemon.enter("Swap", request, context)
        return cache_pb2.SwapResponse(tickets=self._daemon.loads)

    def Recycle(self, request: cache_pb2.RecycleRequest, context: Any) -> cache_pb2.RecycleResponse:
        self._daemon.enter("Recycle", request, context)
        return cache_pb2.RecycleResponse()

    def Release(self, request: cache_pb2.ReleaseRequest, context: Any) -> cache_pb2.ReleaseResponse:
        self._daemon.enter("Release", request, context)
        return cache_pb2.ReleaseResponse(freed_pages=2)

    def Prefetch(self, request: cache_pb2.PrefetchRequest, context: Any) -> cache_pb2.PrefetchResponse:
        self._daemon.enter("Prefetch", request, context)
        return cache_pb2.PrefetchResponse(device_blocks=3)

    def WaitTickets(self, request: cache_pb2.WaitTicketsRequest, context: Any) -> cache_pb2.WaitTicketsResponse:
        self._daemon.enter("WaitTickets", request, context)
        return cache_pb2.WaitTicketsResponse(tickets=self._daemon.ended)

    def Step(self, request_iterator: Any, context: Any) -> Iterator[cache_pb2.StepResponse]:
        """Tests see and answer each entry of the columns as the operation that it stands for, before the others."""
        for request in request_iterator:
            assert self._daemon.layout is not None
            self._daemon.enter("Step", without_columns(request, len(self._daemon.layout.groups)), context)
            answer = with_columns(self._daemon.step_answers.popleft(), request)
            answer.request_id = request.request_id
            yield answer


def slab_token(group: int) -> bytes:
    return b"slab-of-group-%02d" % group


def cells(group: int, pages: Any, *, first_block: int = 0, generation: int = 1) -> common_pb2.GroupPages:
    """Table cells as the daemon sends them."""
    ids = list(pages)
    return common_pb2.GroupPages(
        group=group,
        first_block=first_block,
        pages=pack_pages(ids),
        generations=pack_numbers([generation] * len(ids)),
    )
