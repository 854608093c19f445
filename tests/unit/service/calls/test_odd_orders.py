"""Calls in odd orders through the dispatcher: between their slices leases, devices and processes are lost, transfers
fail and callers leave. No call is INTERNAL, no model is distrusted, and at the end nothing is held."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvcache.v1 import cache_pb2
from kvcache.v1.cache_pb2 import OperationError

from cachesvc.flows.core import Turns, resolve
from cachesvc.flows.leases import attach, close_lease, empty_lost, lose_device, lose_silent, open_lease, process_arrived
from cachesvc.flows.registration import PoolRequest, RegisterRequest, register
from cachesvc.ledger.ledger import LeaseState
from cachesvc.model.errors import CacheError
from cachesvc.model.words import PageState, WritePolicy
from tests.long_cases import looped
from tests.unit.rigs.dispatch_rig import Desk, turns
from tests.unit.rigs.ledger_rig import TOKEN, chain, hybrid, one_group, rig_of, windowed
from tests.unit.rigs.turns_rig import SMALL

ACTIONS = 100
TURNS = (SMALL, SMALL._replace(loaded=1), Turns())
LAYOUTS = (one_group, windowed, hybrid, lambda: windowed(pool="kv"))
PROMPTS = ("abcdefgh", "abcxyz", "ab", "qrstuv")


class Orders:
    """Engines of one model, as one random generator has them act."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.layout = self.rng.choice(LAYOUTS)()
        groups = len(self.layout.groups)
        self.pages = (self.rng.choice((8, 16, 30)),) * groups
        self.rig = rig_of(
            self.layout,
            device=self.pages,
            host=(self.rng.choice((0, 6, 20)),) * groups,
            policy=self.rng.choice(list(WritePolicy)),
            replicas=2,
            eviction=self.rng.choice(("lru", "hazard")),
        )
        self.core = self.rig.core
        self.core.turns = self.rng.choice(TURNS)
        self.desk = Desk(self.rig)
        self.node = self.desk.node
        self.served: list[asyncio.Future[Any]] = []

    # -- calls -----------------------------------------------------------------------------------------------------

    def message(self, lease: str) -> tuple[str, Any]:
        """A call of a sequence that may be there or not."""
        rng, number = self.rng, self.rng.choice((0, 1, 2, 3, (1 << 64) - 1))
        name = rng.choice(("match", "allocate", "allocate", "publish", "publish", "swap", "recycle", "release"))
        keys = chain(*rng.choice(PROMPTS)[: rng.randint(1, 8)])
        if name == "match":
            wrong = keys[:32] + chain(*"qrst")[64:] if rng.random() < 0.1 else keys
            return name, cache_pb2.MatchRequest(sequence_id=number, keys=wrong)
        if name == "allocate":
            return name, cache_pb2.AllocateRequest(sequence_id=number, blocks=rng.choice((0, 2, 5, 8, 12, 1 << 31)))
        if name == "publish":
            held = self.core.ledger.leases[lease].sequences.get(number) if lease in self.core.ledger.leases else None
            first = 0 if held is None else held.sealed
            blocks = 1 if held is None else max(1, held.blocks - first)
            return name, cache_pb2.PublishRequest(sequence_id=number, first_block=first, blocks=blocks)
        if name == "swap":
            ways = cache_pb2.SWAP_DIRECTION_OUT, cache_pb2.SWAP_DIRECTION_IN
            return name, cache_pb2.SwapRequest(sequence_id=number, direction=rng.choice(ways))
        if name == "recycle":
            return name, cache_pb2.RecycleRequest(sequence_id=number, computed_tokens=rng.choice((0, 12, 1 << 63)))
        return name, cache_pb2.ReleaseRequest(sequence_id=number)

    def calls(self) -> None:
        """One call, or a Step of some."""
        lease = self.a_lease()
        if self.rng.random() < 0.6:
            name, message = self.message(lease)
            message.lease_id = lease
        else:
            name = "step"
            message = cache_pb2.StepRequest(lease_id=lease, request_id=self.rng.randint(1, 1 << 40))
            message.no_wait = self.rng.random() < 0.3
            for _ in range(self.rng.randint(1, 4)):
                kind, operation = self.message(lease)
                getattr(message.operations.add(), kind).CopyFrom(operation)
            if self.rng.random() < 0.4:
                message.stock_pages.extend(self.rng.choice((0, 2, 40)) for _ in self.layout.groups)
        served = self.desk.ask(getattr(self.desk.cache, name), message, process=self.rng.choice("pq"))
        if isinstance(served, asyncio.Future):
            self.served.append(served)
        else:
            self.answered(served)

    def answered(self, answer: Any) -> None:
        """No answer is a defect."""
        errors = [answer] if isinstance(answer, OperationError) else []
        if isinstance(answer, cache_pb2.StepResponse):
            errors = [result.error for result in answer.results]
        assert all(error.code != "INTERNAL" for error in errors)

    def a_lease(self) -> str:
        """A live lease, mostly; a new one where there is none."""
        live = [lease.id for lease in self.core.ledger.leases.values() if lease.state is LeaseState.LIVE]
        if not live or self.rng.random() < 0.1:
            with suppress(CacheError, IndexError):
                live.append(self.opens())
        return self.rng.choice(live) if live else "none"

    def opens(self) -> str:
        token = TOKEN + self.rng.choice((b"a", b"b", b"c"))
        if token not in self.core.ledger.processes:
            process_arrived(self.core, token, 1, 1)
        replica, instance = self.rng.choice(self.rig.model.replicas).id, self.rng.choice(("", "", "shared"))
        lease = open_lease(self.core, 1, replica, "engine", token, 0, self.node.now(), instance)
        attach(self.core, resolve(self.core.ledger, lease.id, self.node.now()), 0, token)
        return lease.id

    # -- what comes between ----------------------------------------------------------------------------------------

    async def lands(self, error: Exception | None = None) -> None:
        if self.rig.mover.transfers:
            await self.desk.land(self.rng.choice(list(self.rig.mover.transfers)), error)

    async def fails(self) -> None:
        await self.lands(OSError("broken"))

    async def goes_on(self) -> None:
        await turns(self.rng.choice((1, 3)))

    async def gives_up(self) -> None:
        if self.served:
            self.rng.choice(self.served).cancel()

    async def loses_a_device(self) -> None:
        """A device's transfers end before it is lost; it is registered again, or not."""
        while self.rig.mover.transfers:
            await self.fails()
        await self.idle()
        device = self.rng.choice(sorted(self.rig.vault.device_bytes))
        self.node.run(lose_device, self.core, device, "its mover has ended")
        if self.rng.random() < 0.7:
            self.rig.vault.device_bytes[device] = 1 << 20
            request = RegisterRequest("m", self.layout, b"", (device,), PoolRequest(self.pages), PoolRequest())
            register(self.core, self.rig.vault, request, self.node.now())

    async def loses_a_lease(self) -> None:
        """A process ends, a lease falls silent, or it is closed."""
        leases = list(self.core.ledger.leases.values())
        if not leases:
            return
        lease, way = self.rng.choice(leases), self.rng.random()
        if way < 0.4:
            self.node.process_gone(self.rng.choice(sorted(self.core.ledger.processes)))
        elif way < 0.7:
            lease.last_heard = self.node.now() - 1e6
            self.node.run(lose_silent, self.core, 1000.0, self.node.now())
        else:
            self.node.run(close_lease, self.core, lease.id, quiesced=self.rng.random() < 0.5)

    # -- all of it -------------------------------------------------------------------------------------------------

    async def idle(self) -> None:
        """Until all that runs has ended, and calls that waited have gone on."""
        while True:
            await turns(20)
            if not (self.rig.mover.transfers or self.core.chores or self.node.has_turns):
                return
            await self.lands()

    def check(self) -> None:
        for each in [served for served in self.served if served.done()]:
            self.served.remove(each)
            if not each.cancelled():
                self.answered(each.result())
        self.rig.check()
        assert not self.rig.model.suspect

    async def run(self) -> None:
        between: list[Callable[[], Any]] = [self.lands] * 6 + [self.goes_on] * 4 + [self.fails, self.gives_up]
        between += [self.loses_a_lease, self.loses_a_device]
        async with self.desk:
            for _ in range(ACTIONS):
                if self.rng.random() < 0.7:
                    self.calls()
                else:
                    await self.rng.choice(between)()
                self.check()
            await self.idle()
            await asyncio.gather(*self.served, return_exceptions=True)  # each call is answered
            self.check()
            for token in list(self.core.ledger.processes):
                self.node.process_gone(token)
            await self.idle()
            self.node.run(empty_lost, self.core)
            await self.idle()
            self.check()
        ledger, model = self.core.ledger, self.rig.model
        left = ledger.leases, ledger.key_bytes, ledger.tickets.running, model.blocks.computing, model.lost
        assert not any(left), left
        for replica in model.replicas:
            assert not replica.place.reservations
            assert all(pool.counts[PageState.PRIVATE] == 0 for pool in replica.place.pools)


@looped("seed", range(6), range(12))
def test_calls_in_odd_orders_break_nothing_and_leave_nothing(seed: int) -> None:
    asyncio.run(Orders(seed).run())
