"""The same game against a real daemon behind its socket; and what is no message at all, on both of its sockets."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
from asyncio.subprocess import PIPE
from collections import Counter
from typing import Any, NamedTuple

import grpc
import grpc.aio
from kvcache.v1 import admin_pb2, admin_pb2_grpc

from cachesvc.wire.status import AUTHORIZATION_METADATA_KEY, BEARER, LIFE_SUFFIX
from tests.fuzz.lanes import SHARE, Lanes, throw_frames
from tests.fuzz.target import ANSWERS_READ, Rpc, list_rpcs, usage_of

LONGEST_SECONDS = 5.0
OWN_ERROR = "Internal error from Core"
"""Message of gRPC's client for a write to a stream that the daemon has ended meanwhile."""
LIVE = """
import socket, sys
life = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
life.connect(sys.argv[1])
print(life.recv(64)[4:20].hex(), flush=True)
sys.stdin.read()
"""
HELD = ("private", "in_flight", "quarantined")
LOOK_SECONDS = 0.02
BOUND_SECONDS = 60.0
Metadata = tuple[tuple[str, str], ...]


class Tokens(NamedTuple):
    """Token of a client: its ``own``, at times one of ``others``, a wrong one, or none; ``admin`` to look."""

    own: str
    others: tuple[str, ...]
    admin: str

    def draw(self, rng: random.Random, service: str) -> str:
        """For one call of a fuzzer. An engine's own token opens nothing of AdminService."""
        kind = rng.random()
        if kind < 0.03:
            return rng.choice(("", "guess", "x" * 5000))
        if kind < (0.7 if service.endswith("AdminService") else 0.06):
            return rng.choice(self.others)
        return self.own


class RemoteTarget:
    """A daemon's process by its socket."""

    def __init__(self, socket_path: str, pid: int, tokens: Tokens | None = None, seed: int = 0) -> None:
        self._tokens = tokens
        self._rng = random.Random(f"tokens of {seed}")
        self.statuses: Counter[str] = Counter()
        self.crashes: list[str] = []
        self._path = socket_path
        self._pid = pid
        self._channel: grpc.aio.Channel | None = None
        self._lives: dict[bytes, asyncio.subprocess.Process] = {}
        self._answers: dict[str, Any] = {}
        self._lanes = Lanes(socket_path)

    async def start(self) -> None:
        """Connect."""
        self._channel = grpc.aio.insecure_channel(f"unix:{self._path}")
        self._answers = {rpc.path: rpc.answer for rpc in list_rpcs().values()}
        self._lanes.start()

    async def close(self) -> None:
        """Disconnect."""
        self._lanes.close()
        for token in list(self._lives):
            await self.end_process(token)
        if self._channel is not None:
            await self._channel.close()

    async def call(
        self, rpc: Rpc, raw: list[bytes], seconds: float | None = None, *, as_itself: bool = False
    ) -> tuple[grpc.StatusCode, list[Any]]:
        """Send bytes as they are."""
        assert self._channel is not None
        limit = seconds or LONGEST_SECONDS
        metadata = self._shown(rpc, as_itself=as_itself)
        answers: list[Any] = []
        code, details = grpc.StatusCode.OK, ""
        read = self._answers[rpc.path].FromString
        try:
            if self._lanes.carries(rpc) and self._rng.random() < SHARE:
                answers += await self._lanes.call(rpc, raw, limit, metadata or ())
            elif rpc.gives_stream:
                shape: Any = self._channel.stream_stream if rpc.takes_stream else self._channel.unary_stream
                sent = iter(raw) if rpc.takes_stream else raw[0]
                call = shape(rpc.path)(sent, timeout=limit, metadata=metadata)
                async for answer in call:
                    answers.append(read(answer))
                    if len(answers) >= ANSWERS_READ:
                        call.cancel()
                        break
            else:
                ask: Any = self._channel.unary_unary(rpc.path)
                answers.append(read(await ask(raw[0], timeout=limit, metadata=metadata)))
        except grpc.aio.AioRpcError as failure:  # by whichever way
            code, details = failure.code(), failure.details() or ""
        except asyncio.CancelledError:  # the deadline came while the stream was being ended
            if not seconds:
                raise
            code = grpc.StatusCode.CANCELLED
        if details == OWN_ERROR:
            code = grpc.StatusCode.CANCELLED
        if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
            self.crashes.append(f"{rpc.name}: {code.name} {details}; {raw[0][:200].hex()}")
        self.statuses[code.name] += 1
        return code, answers

    async def new_process(self) -> bytes:
        """A process with a life connection."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-S", "-c", LIVE, self._path + LIFE_SUFFIX, stdin=PIPE, stdout=PIPE
        )
        assert process.stdout is not None
        token = bytes.fromhex((await process.stdout.readline()).decode())
        self._lives[token] = process
        return token

    async def end_process(self, token: bytes) -> None:
        """It is killed."""
        process = self._lives.pop(token)
        process.kill()
        await process.wait()

    async def problems(self) -> list[str]:
        """Problems that Verify finds."""
        return list((await self._admin().Verify(admin_pb2.VerifyRequest(), metadata=self._looking)).problems)

    async def rest(self) -> dict[str, int]:
        """Wait until no page is held; then the pages held all the same."""
        loop = asyncio.get_running_loop()
        until = loop.time() + BOUND_SECONDS
        while True:
            status = await self._admin().GetStatus(admin_pb2.GetStatusRequest(), metadata=self._looking)
            held = {what: sum(getattr(pool, what) for pool in status.pools) for what in HELD}
            leases = await self._admin().ListLeases(admin_pb2.ListLeasesRequest(), metadata=self._looking)
            held["leases"] = len(leases.leases)
            if not any(held.values()) or loop.time() > until:
                return held
            await asyncio.sleep(LOOK_SECONDS)

    def usage(self) -> tuple[int, int, int]:
        """Usage of the daemon's process."""
        return usage_of(str(self._pid))

    @property
    def _looking(self) -> Metadata | None:
        return None if self._tokens is None else bearer(self._tokens.admin)

    def _shown(self, rpc: Rpc, *, as_itself: bool) -> Metadata | None:
        if self._tokens is None:
            return None
        return bearer(self._tokens.own if as_itself else self._tokens.draw(self._rng, rpc.service))

    def _admin(self) -> Any:
        assert self._channel is not None
        return admin_pb2_grpc.AdminServiceStub(self._channel)


def bearer(token: str) -> Metadata | None:
    """A token as a call's metadata; none for an empty one."""
    return ((AUTHORIZATION_METADATA_KEY, BEARER + token),) if token else None


def throw_garbage(socket_path: str, rng: random.Random, count: int) -> None:
    """Bytes that are no HTTP/2 on the one socket, no question on the other, and no frames on a lane."""
    for number in range(count):
        throw_frames(socket_path, rng)
        is_life = number % 2 == 0
        kind = socket.SOCK_SEQPACKET if is_life else socket.SOCK_STREAM
        with socket.socket(socket.AF_UNIX, kind) as peer:
            peer.connect(socket_path + (LIFE_SUFFIX if is_life else ""))
            head = rng.choice((b"", b"FD", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"))
            try:
                for _ in range(rng.randrange(1, 4)):
                    peer.send(head + rng.randbytes(rng.choice((1, 9, 16, 17, 200))))
            except (BrokenPipeError, ConnectionResetError):
                continue  # it hung up on us, as it should
