"""The run itself: sensible, mutated and random messages in turn, with a look at the accounting every few thousand."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError, Message
from kvcache.v1 import engine_pb2, lease_pb2

from tests.fuzz.messages import Generator, mutate
from tests.fuzz.pools import KEPT, Lease, Pools
from tests.fuzz.target import Rpc, list_rpcs
from tests.fuzz.workload import Workload, prompts, registers

LOOK_EVERY = 5000
TOGETHER = 6
LEASES = 6
DEVICES = ("shm-0", "shm-1")
RARELY = {
    "Drain": 0.02,
    "Register": 0.15,
    "Evict": 0.1,
    "Verify": 0.05,
    "GetTree": 0.1,
    "ListTickets": 0.1,
    "ListModels": 0.3,
    "Close": 0.1,
}


class AnyTarget(Protocol):
    """A daemon, in this process or behind its socket. ``crashes`` are handlers that broke or answered INTERNAL."""

    statuses: Counter[str]
    crashes: list[str]

    async def call(
        self, rpc: Rpc, raw: list[bytes], seconds: float | None = None, *, as_itself: bool = False
    ) -> tuple[grpc.StatusCode, list[Any]]:
        """Send the messages of one call; the status and what came back. ``as_itself``: with the caller's own token."""

    async def new_process(self) -> bytes:
        """The token of a process that attached."""

    async def end_process(self, token: bytes) -> None:
        """It has ended."""

    async def problems(self) -> list[str]:
        """Problems that conservation finds."""

    async def rest(self) -> dict[str, int]:
        """Wait for what runs; then the pages and leases that are still held."""

    def usage(self) -> tuple[int, int, int]:
        """The daemon's resident KiB, open descriptors and threads."""


@dataclass
class Findings:
    """Result of a run. ``grown_kib``: resident memory from the first look to the last."""

    messages: int = 0
    sensible: int = 0
    mutated: int = 0
    random: int = 0
    crashes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    rpcs: dict[str, int] = field(default_factory=dict)
    grown_kib: int = 0
    descriptors_more: int = 0
    threads_more: int = 0
    seconds: float = 0.0

    def add(self, other: Findings) -> None:
        """Count another run's into this one; of the two machines' memory and time the larger stands."""
        for name in ("messages", "sensible", "mutated", "random", "crashes", "problems"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("left", "statuses", "rpcs"):
            merged = Counter(getattr(self, name)) + Counter(getattr(other, name))
            setattr(self, name, dict(sorted(merged.items())))
        for name in ("grown_kib", "descriptors_more", "threads_more", "seconds"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))

    def shown(self) -> dict[str, Any]:
        """The findings as JSON."""
        return asdict(self)


class Fuzzer:
    """Drives one Target under one seed. ``is_alone``: no other fuzzer does, so that at the end no page may be held."""

    def __init__(
        self, target: AnyTarget, seed: int, without: frozenset[str] = frozenset(), *, is_alone: bool = True
    ) -> None:
        self._is_alone = is_alone
        self.rng = random.Random(seed)
        self.pools = Pools(self.rng)
        self.generator = Generator(self.rng, self.pools)
        self.workload = Workload(self.rng, self.pools)
        self.findings = Findings()
        self._target = target
        self._rpcs = list_rpcs()
        self._chosen = [rpc for rpc in self._rpcs.values() if rpc.name not in without]
        self._recorded: list[tuple[Rpc, bytes]] = []
        self._granted: list[tuple[int, int, bytes, int]] = []

    async def run(self, messages: int) -> Findings:
        """Try that many messages. Stops early only where accounting is wrong: what follows would mean nothing."""
        began = time.monotonic()
        self.pools.devices = DEVICES
        await self._register()
        self.pools.tokens = [await self._target.new_process() for _ in range(3)]
        before: tuple[int, int, int] | None = None
        while self.findings.messages < messages and not self.findings.problems:
            next_look = self.findings.messages + min(LOOK_EVERY, messages)
            while self.findings.messages < next_look:
                await self._one_round()
            self.findings.problems = await self._target.problems()
            if before is None or self.findings.messages <= messages // 10:
                before = self._target.usage()  # caches and pools have filled by then
        await self._end()
        assert before is not None
        after = self._target.usage()
        self.findings.grown_kib, self.findings.descriptors_more, self.findings.threads_more = (
            now - then for now, then in zip(after, before, strict=True)
        )
        self.findings.statuses = dict(sorted(self._target.statuses.items()))
        self.findings.crashes = self._target.crashes
        self.findings.seconds = round(time.monotonic() - began, 1)
        return self.findings

    async def _register(self) -> None:
        """The models; those that gave way to what was fuzzed are made again."""
        self._granted.clear()
        for request in registers():
            raw = [request.SerializeToString()]
            code, answers = await self._target.call(self._rpcs["Register"], raw, as_itself=True)
            assert answers, f"a plain Register was refused: {code}"
            made = answers[0]
            self._recorded.append((self._rpcs["Register"], request.SerializeToString()))
            self.pools.models[made.model_id] = made.namespace
            self.pools.layouts.append(request.layout)
            self._granted.append((made.model_id, made.replica, made.namespace, len(request.layout.groups)))

    async def _one_round(self) -> None:
        await self._keep_leases()
        await asyncio.gather(*(self._one() for _ in range(self.rng.randrange(1, TOGETHER))))

    async def _one(self) -> None:
        kind = self.rng.random()
        drawn = self.workload.draw() if kind < 0.45 else None
        if drawn is not None:
            rpc, request = self._rpcs[drawn[0]], drawn[1]
            self.findings.sensible += 1
            await self._send(rpc, [request.SerializeToString()])
        elif kind < 0.7 and self._recorded:
            rpc, raw = self.rng.choice(self._recorded)
            if self.rng.random() < RARELY.get(rpc.name, 1.0):
                self.findings.mutated += 1
                await self._send(rpc, [self._mutated(rpc, raw)])
        else:
            rpc = self.rng.choice(self._chosen)
            if self.rng.random() < RARELY.get(rpc.name, 1.0):
                self.findings.random += 1
                count = self.rng.choice((1, 1, 2, 3)) if rpc.takes_stream else 1
                await self._send(rpc, [self.generator.make(rpc.request).SerializeToString() for _ in range(count)])

    def _mutated(self, rpc: Rpc, raw: bytes) -> bytes:
        """One time in five as bytes, which mostly do not parse any more; else field by field."""
        if self.rng.random() < 0.2:
            return mutate(self.rng, raw)
        try:
            message = rpc.request.FromString(raw)
        except DecodeError:
            return raw
        self.generator.disturb(message)
        return message.SerializeToString()

    async def _send(self, rpc: Rpc, raw: list[bytes]) -> None:
        self.findings.messages += len(raw)
        self.findings.rpcs[rpc.name] = self.findings.rpcs.get(rpc.name, 0) + len(raw)
        if len(self._recorded) < 40 * KEPT:
            self._recorded.append((rpc, raw[0]))
        elif self.rng.random() < 0.2:
            self._recorded[self.rng.randrange(len(self._recorded))] = (rpc, raw[0])
        code, answers = await self._target.call(rpc, raw, self.rng.choice((None, 0.0, 0.02)))
        for one, answer in zip(raw, answers, strict=False):
            self._learn(rpc, one, answer)
        if code is grpc.StatusCode.ABORTED:
            self._lose(rpc, raw[0])

    def _lose(self, rpc: Rpc, raw: bytes) -> None:
        """A lease is lost: its engine would open another one."""
        request: Any = rpc.request.FromString(raw)
        for lease in [one for one in self.pools.leases if one.id == request.lease_id]:
            self._forget(lease)

    def _learn(self, rpc: Rpc, raw: bytes, answer: Message) -> None:
        try:
            request: Any = rpc.request.FromString(raw)
        except DecodeError:
            return
        if rpc.name == "Close":
            for lease in [one for one in self.pools.leases if one.id == request.lease_id]:
                self._forget(lease)
        self.workload.learn(request, [answer])

    async def _keep_leases(self) -> None:
        """Open what is missing; now and then an engine dies or leaves."""
        if self.rng.random() < 0.002 and self.pools.leases:
            lease = self.rng.choice(self.pools.leases)
            if self.rng.random() < 0.5:
                await self._target.end_process(lease.token)
                for dead in [one for one in self.pools.leases if one.token == lease.token]:
                    self._forget(dead)
                self.pools.tokens.remove(lease.token)
                self.pools.tokens.append(await self._target.new_process())
            else:
                await self._close(lease, quiesced=self.rng.random() < 0.8)
        while len(self.pools.leases) < LEASES:
            model, replica, namespace, groups = self.rng.choice(self._granted)
            token = self.rng.choice(self.pools.tokens)
            request = lease_pb2.OpenRequest(model_id=model, replica=replica, engine="fuzz", process_token=token)
            _, answers = await self._target.call(self._rpcs["Open"], [request.SerializeToString()], as_itself=True)
            self._recorded.append((self._rpcs["Open"], request.SerializeToString()))
            if not answers:  # leases of fuzzed Opens fill the table, or an idle model gave way to a fuzzed one
                await self._end_processes()
                await self._register()
                continue
            attach = engine_pb2.AttachRequest(lease_id=answers[0].lease_id, process_token=token)
            await self._send(self._rpcs["Attach"], [attach.SerializeToString()])
            self.pools.leases.append(Lease(answers[0].lease_id, model, token, groups, prompts(namespace)))

    async def _close(self, lease: Lease, *, quiesced: bool) -> None:
        request = lease_pb2.CloseRequest(lease_id=lease.id, quiesced=quiesced)
        await self._target.call(self._rpcs["Close"], [request.SerializeToString()], as_itself=True)
        self._forget(lease)

    def _forget(self, lease: Lease) -> None:
        self.pools.leases.remove(lease)
        self.pools.ended.append(lease.id)

    async def _end_processes(self) -> None:
        for token in self.pools.tokens:
            await self._target.end_process(token)
        for lease in list(self.pools.leases):
            self._forget(lease)
        self.pools.tokens = [await self._target.new_process() for _ in range(3)]

    async def _end(self) -> None:
        """All engines leave; every page must come back once what runs has ended."""
        for lease in list(self.pools.leases):
            await self._close(lease, quiesced=True)
        for token in self.pools.tokens:
            await self._target.end_process(token)
        if self._is_alone:
            self.findings.left = await self._target.rest()
            self.findings.problems += await self._target.problems()
