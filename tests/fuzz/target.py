"""A whole daemon in this process, its servicers called without a socket: real flows, copies, host pool and timeline."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from kvcache.v1 import admin_pb2, cache_pb2, engine_pb2, event_pb2, lease_pb2
from kvcache.v1.status_pb2 import TransportStatus

from cachesvc.flows.core import Core, Limits
from cachesvc.flows.leases import process_arrived, process_gone
from cachesvc.ledger.ledger import Ledger
from cachesvc.memory.host_pool import HostPool
from cachesvc.memory.shm import ShmBackend
from cachesvc.model.words import PageState, WritePolicy
from cachesvc.policy.eviction import WriteRule, eviction_policy
from cachesvc.service.access.admission import Admission
from cachesvc.service.access.auth import EVERYONE, set_caller
from cachesvc.service.access.quota import NO_QUOTA, Quotas
from cachesvc.service.admin.admin_service import Administration, AdminService, Inspection
from cachesvc.service.admin.checksums import Checksums
from cachesvc.service.admin.storage_answers import StorageAnswers
from cachesvc.service.calls.dispatcher import Dispatcher
from cachesvc.service.host.device_health import DeviceHealth, Facts
from cachesvc.service.host.health import Serving
from cachesvc.service.loop.node import Node
from cachesvc.service.rpc.edge import Edge
from cachesvc.service.rpc.event_service import EventService
from cachesvc.service.rpc.services import CacheService, EngineService, LeaseService
from cachesvc.swap.engine import SwapEngine
from cachesvc.swap.movers import InProcessMovers
from cachesvc.swap.vault import Vault
from tests.conservation import audit
from tests.fuzz.workload import registers

DEVICE_BYTES = 16 << 20
HOST_BYTES = 8 << 20
WAIT_SECONDS = 0.05
MODULES = (engine_pb2, lease_pb2, cache_pb2, event_pb2, admin_pb2)
ANSWERS_READ = 4
HANG_UP_SECONDS = 0.02
"""After which a caller gives up on a stream that says nothing more."""


class Rpc(NamedTuple):
    """One RPC by its descriptor."""

    service: str
    name: str
    request: type[Message]
    answer: type[Message]
    takes_stream: bool
    gives_stream: bool

    @property
    def path(self) -> str:
        """Path of the method on the wire."""
        return f"/{self.service}/{self.name}"


def list_rpcs() -> dict[str, Rpc]:
    """Every RPC of our own services, by name."""
    out: dict[str, Rpc] = {}
    for module in MODULES:
        services: Any = module.DESCRIPTOR.services_by_name
        for service in services.values():
            for method in service.methods:
                request, answer = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
                out[method.name] = Rpc(
                    service.full_name, method.name, request, answer, method.client_streaming, method.server_streaming
                )
    return out


class CallContext:
    """Context of a call for a servicer; it keeps how the call ended."""

    def __init__(self, seconds: float | None = None) -> None:
        self.written: list[Any] = []
        self.code = grpc.StatusCode.OK
        self.details = ""
        self._seconds = seconds

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        self.code, self.details = code, details
        raise grpc.aio.AbortError(details)

    async def write(self, answer: Any) -> None:
        """The caller hangs up once it has read enough."""
        self.written.append(answer)
        if len(self.written) >= ANSWERS_READ:
            raise asyncio.CancelledError

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """Not looked at: the status tells as much."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> float | None:
        return self._seconds

    def peer(self) -> str:
        return "unix:"


class Target:
    """Everything of a daemon but the server. ``call`` answers with the status; whatever breaks out is a crash."""

    def __init__(self) -> None:
        self.backend = ShmBackend(2, DEVICE_BYTES)
        self.engine = SwapEngine(InProcessMovers(self.backend), self._landed)
        self.core = Core(
            Ledger(),
            self.engine,
            eviction_policy("lru"),
            WriteRule(WritePolicy("write_back"), 2),
            Limits(blocks_per_sequence=64, sequences_per_lease=64, stock_pages_per_lease=16, leases=48, models=12),
            new_name=partial(secrets.token_hex, 16),
        )
        self.node = Node(self.core, epoch=7, wait_seconds=WAIT_SECONDS, lease_seconds=3600.0)
        self.host_pool = HostPool(HOST_BYTES, 4 << 20, 1, None, self.backend)
        self.dispatcher = Dispatcher(self.node, Admission(64, 256, 128))
        self.statuses: Counter[str] = Counter()
        self.crashes: list[str] = []
        self._servicers: dict[str, Any] = {}

    async def start(self) -> None:
        """Start memory, transfers and servicers."""
        self.backend.start()
        self.engine.start()
        self.node.start(Vault(self.backend, self.host_pool, self.engine, self.node.on_host_pages))
        self.host_pool.start()
        node, edge = self.node, Edge(self.dispatcher)
        health = DeviceHealth(self.backend, node, self.tell)
        facts = self.facts = Facts(
            version="fuzzed",
            backend="shm",
            epoch=node.epoch,
            started=node.started,
            lease_seconds=node.lease_seconds,
            device_pool_bytes=DEVICE_BYTES,
            host_pool_bytes=HOST_BYTES,
            host_chunk_bytes=4 << 20,
            eviction="lru",
            settings={},
            devices=[],
            host_pool=self.host_pool,
            health=health,
            transports=lambda: TransportStatus(grpc_calls=edge.calls),
            loop=node.loop_watch,
            keyring=None,
        )
        quotas = Quotas(self.core, lambda _: NO_QUOTA)
        self._following = EventService(node, 64)
        self._following.start()
        self._servicers = {
            "EngineService": EngineService(edge, self.backend),
            "LeaseService": LeaseService(edge),
            "CacheService": CacheService(edge, 256),
            "EventService": self._following,
            "AdminService": AdminService(
                edge,
                Inspection(node, Checksums(node, self.engine.page_bytes, "off", 1)),
                Administration(node, health, 0.0),
                facts,
                quotas,
                list,
                StorageAnswers(node),
            ),
        }

    async def close(self) -> None:
        """End it all, in reverse."""
        self._following.close()
        await self.node.close()
        self.host_pool.close()
        self.engine.close()
        self.backend.close()

    def _landed(self, ticket: int, error: Exception | None) -> None:
        self.node.on_transfer_done(ticket, error)

    async def tell(self, serving: Serving) -> None:
        """Do nothing: this daemon has no probes."""

    async def new_process(self) -> bytes:
        """A process as the life socket would tell it."""
        token = secrets.token_bytes(16)
        process_arrived(self.core, token, 4242, 0)
        return token

    async def end_process(self, token: bytes) -> None:
        """Its end."""
        self.node.run(partial(process_gone, self.core, token))

    async def call(
        self, rpc: Rpc, raw: list[bytes], seconds: float | None = None, *, as_itself: bool = False
    ) -> tuple[grpc.StatusCode, list[Any]]:
        """Parse and serve; messages that do not parse never reach a handler, as on the wire. Returns what came back."""
        try:
            requests = [rpc.request.FromString(one) for one in raw]
        except Exception as refused:  # noqa: BLE001 - what gRPC's own deserializer answers with
            self.statuses["does not parse"] += 1
            del refused
            return grpc.StatusCode.INVALID_ARGUMENT, []
        context = CallContext(seconds)
        set_caller(EVERYONE)
        handler = getattr(self._servicers[rpc.service.rpartition(".")[2]], rpc.name)
        answers: list[Any] = []
        try:
            if rpc.gives_stream and inspect.iscoroutinefunction(handler):
                with contextlib.suppress(TimeoutError, asyncio.CancelledError):  # its caller hung up
                    await asyncio.wait_for(handler(requests[0], context), HANG_UP_SECONDS)
                answers = context.written
            elif rpc.gives_stream:
                stream = handler(_feed(requests) if rpc.takes_stream else requests[0], context)
                async for answer in stream:
                    answers.append(answer)
                    if len(answers) >= ANSWERS_READ:
                        break
                await stream.aclose()
            else:
                answers.append(await handler(requests[0], context))
            answers = [rpc.answer.FromString(each) if isinstance(each, bytes) else each for each in answers]
            for answer in answers:
                answer.SerializeToString()
        except grpc.aio.AbortError:
            pass  # the status says how
        except Exception as broken:  # noqa: BLE001 - the finding of a fuzzer
            self.crashes.append(f"{rpc.name}: {type(broken).__name__}: {broken}; {requests[0]!s:.300}")
        self.core.ledger.draining = False  # a Drain must not end the run: the next messages want new sequences
        if context.code is grpc.StatusCode.INTERNAL:
            self.crashes.append(f"{rpc.name}: INTERNAL; {requests[0]!s:.300}")
        self.statuses[context.code.name] += 1
        return context.code, answers

    async def open_lease(self, engine: str = "engine") -> str:
        """A lease on a model of its own, by a process of its own: its id."""
        rpcs = list_rpcs()
        _, made = await self.call(rpcs["Register"], [registers()[0].SerializeToString()])
        request = lease_pb2.OpenRequest(
            model_id=made[0].model_id, replica=0, engine=engine, process_token=await self.new_process()
        )
        _, opened = await self.call(rpcs["Open"], [request.SerializeToString()])
        return str(opened[0].lease_id)

    async def problems(self) -> list[str]:
        """Problems that conservation finds."""
        return audit(self.core.ledger).problems

    async def rest(self) -> dict[str, int]:
        """Wait for transfers and chores to end; then count the pages held or moved, over all pools, and the leases."""
        while self.core.ledger.tickets.running or self.core.chores or self.node.has_turns:
            await self.node.wait_any(list(self.core.ledger.tickets.running), 60.0, "fuzz")
        pools = [
            pool
            for model in self.core.ledger.models.values()
            for place in model.blocks.index.places
            for pool in place.pools
        ]
        held = {
            state.name.lower(): sum(pool.counts[state] for pool in pools)
            for state in (PageState.PRIVATE, PageState.IN_FLIGHT, PageState.QUARANTINED)
        }
        return held | {"leases": len(self.core.ledger.leases)}

    def usage(self) -> tuple[int, int, int]:
        """Call ``usage_of`` for this process."""
        gc.collect()
        return usage_of("self")


def usage_of(process: str) -> tuple[int, int, int]:
    """Resident KiB, open descriptors and threads of a process. Memory files and pipes are left out: they are slabs and
    tell of a sheet's copies, belong to models, and go with them."""
    folder = Path("/proc") / process
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]), _descriptors(folder / "fd"), int(status["Threads"])


def _descriptors(folder: Path) -> int:
    count = 0
    for entry in folder.iterdir():
        try:
            count += not str(entry.readlink()).startswith(("/memfd:", "pipe:"))
        except FileNotFoundError:  # closed meanwhile; the one of this listing, for one
            continue
    return count


@contextlib.asynccontextmanager
async def running_target() -> AsyncIterator[Target]:
    """Start a daemon without a server, and close it."""
    made = Target()
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def _feed(requests: list[Any]) -> AsyncIterator[Any]:
    for request in requests:
        yield request
