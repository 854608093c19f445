"""Registrations on the event loop with memory made on a thread, which waits at a gate where the test wants it to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cachesvc.flows.core import Core
from cachesvc.flows.registration import PoolRequest, Registered, RegisterRequest, memory_of
from cachesvc.ledger.ledger import Ledger
from cachesvc.memory.host_pool import HostPool
from cachesvc.memory.interface import Slab
from cachesvc.memory.shm import ShmBackend
from cachesvc.model.errors import PoolExhausted, Unavailable
from cachesvc.model.layout import device_bytes
from cachesvc.model.words import WritePolicy
from cachesvc.policy.eviction import WriteRule, eviction_policy
from cachesvc.service.calls.registrar import Registrar
from cachesvc.service.loop.node import Node
from cachesvc.swap.engine import SwapEngine
from cachesvc.swap.movers import InProcessMovers
from cachesvc.swap.vault import Vault
from tests.conservation import audit
from tests.unit.rigs.ledger_rig import windowed
from tests.unit.swap.test_vault import two_ranks

LAYOUT = windowed()
PAGES = (64, 64)
POOL_BYTES = device_bytes(LAYOUT, PAGES)
HOST_BYTES = 1 << 20


class GatedBackend(ShmBackend):
    """``begun`` counts slabs that are asked for on the first device. Each waits for a permit, and ends with ``breaks``
    where it is set. ``silent``: devices that do not answer."""

    def __init__(self, devices: int = 1) -> None:
        super().__init__(devices, POOL_BYTES, timeline_words=64)
        self.silent: set[str] = set()
        self.begun = threading.Semaphore(0)
        self.permits = threading.Semaphore(0)
        self.breaks: Exception | None = None

    def require_answer(self, device: str) -> None:
        if device in self.silent:
            raise Unavailable(f"the mover of {device} does not answer")

    def create_slab(self, device: str, size_bytes: int) -> Slab:
        if device != "shm-0":
            return super().create_slab(device, size_bytes)
        self.begun.release()
        self.permits.acquire()
        if self.breaks is not None:
            raise self.breaks
        return super().create_slab(device, size_bytes)


class Desk:
    """A node with a registrar over shared memory."""

    def __init__(self, devices: int = 1) -> None:
        self.backend = GatedBackend(devices)
        self.engine = SwapEngine(InProcessMovers(self.backend), lambda *_: None)
        self.core = Core(Ledger(), self.engine, eviction_policy("lru"), WriteRule(WritePolicy.WRITE_BACK))
        self.node = Node(self.core, epoch=1, wait_seconds=1.0, lease_seconds=3600.0)
        self.host_pool = HostPool(HOST_BYTES, HOST_BYTES, 1, None, self.backend)
        self.vault = Vault(self.backend, self.host_pool, self.engine, self.node.on_host_pages)
        self.registrar = Registrar(self.node)

    def start(self) -> None:
        self.backend.start()
        self.engine.start()
        self.host_pool.start()
        self.node.start(self.vault)

    async def close(self) -> None:
        self.permit(1 << 10)
        await self.registrar.close()
        assert audit(self.core.ledger).problems == []
        await self.node.close()
        self.host_pool.close()
        self.engine.close()
        self.backend.close()

    def permit(self, count: int = 2) -> None:
        """Let ``count`` slabs be made; a model of ours has two."""
        self.backend.permits.release(count)

    async def begun(self) -> None:
        """Until a slab is being made, with the loop free for others."""
        await asyncio.to_thread(self.backend.begun.acquire)

    def register(
        self, name: str, pages: tuple[int, ...] = PAGES, caller: str = "a", device: str = "shm-0"
    ) -> asyncio.Task[Registered]:
        request = self.request(name, pages, device)
        return asyncio.get_running_loop().create_task(self.registrar.register(request, caller))

    def request(self, name: str, pages: tuple[int, ...], device: str = "shm-0", host: int = 8) -> RegisterRequest:
        wanted = PoolRequest(pages), PoolRequest((host, host))
        return RegisterRequest(name, LAYOUT, devices=(device,), device_pool=wanted[0], host_pool=wanted[1])

    @property
    def names(self) -> list[str]:
        return [model.name for model in self.core.ledger.models.values()]

    @property
    def free(self) -> tuple[int, int]:
        return self.vault.device_free_bytes("shm-0"), self.host_pool.free_bytes


@asynccontextmanager
async def desk_of(devices: int = 1) -> AsyncIterator[Desk]:
    desk = Desk(devices)
    desk.start()
    try:
        yield desk
    finally:
        await desk.close()


async def test_the_loop_is_free_while_memory_is_made_and_the_same_model_is_made_once() -> None:
    """Found by reading: allocating, zeroing and freeing device memory held up every engine's calls."""
    async with desk_of() as desk:
        first = desk.register("m")
        await desk.begun()
        assert desk.names == [], "the loop runs, and no lease opens on what is not there yet"
        second = desk.register("m")
        desk.permit()
        one, other = await first, await second
        assert (one.existed, other.existed) == (False, True)
        assert one.model is other.model
        assert (await desk.register("m")).existed
        assert desk.free[0] == 0


async def test_a_model_that_is_there_is_found_while_memory_is_made_for_another() -> None:
    async with desk_of() as desk:
        desk.permit()
        half = (32, 32)
        await desk.register("there", half)
        for _ in range(2):
            await desk.begun()
        waiting = desk.register("other", half)
        await desk.begun()
        found = desk.registrar.find(desk.request("there", half))
        assert found is not None
        assert found.existed
        assert not waiting.done()
        desk.permit()
        await waiting
        assert desk.names == ["there", "other"]


async def test_two_that_come_at_once_never_get_more_than_there_is() -> None:
    async with desk_of() as desk:
        tasks = [desk.register(f"m{i}") for i in range(4)]
        desk.permit(8)
        made = await asyncio.gather(*tasks)
        assert len(made) == 4
        assert desk.names == ["m3"], "each took the place of the idle one before it"
        assert desk.free == (0, HOST_BYTES - 2 * 4096)
        with pytest.raises(PoolExhausted):
            await desk.register("too large", (96, 96))
        assert desk.names == ["m3"]


@pytest.mark.parametrize("error", [Unavailable("no memory"), ZeroDivisionError("a defect")])
async def test_what_cannot_be_made_leaves_nothing_and_the_next_one_has_its_turn(error: Exception) -> None:
    async with desk_of() as desk:
        free = desk.free
        desk.backend.breaks = error
        broken, next_one = desk.register("m"), desk.register("n")
        desk.permit(1)
        with pytest.raises(type(error)):
            await broken
        await desk.begun()
        await desk.begun()
        assert (desk.names, desk.free) == ([], (free[0], free[1] - 2 * 4096)), "the next one has its host pages"
        desk.backend.breaks = None
        desk.permit(2)
        await next_one
        assert desk.names == ["n"]


async def test_each_process_has_its_turn_before_any_has_two() -> None:
    async with desk_of() as desk:
        ended: list[str] = []

        def register(name: str, caller: str) -> asyncio.Task[Registered]:
            task = desk.register(name, caller=caller)
            task.add_done_callback(lambda _: ended.append(name))
            return task

        first = register("a0", "a")
        await desk.begun()
        many = [register(f"a{number}", "a") for number in range(1, 5)]
        few = [register("b0", "b"), register("c0", "c")]
        await asyncio.sleep(0)  # all wait
        many[1].cancel()
        desk.permit(14)
        await asyncio.gather(first, *many, *few, return_exceptions=True)
        assert ended == ["a2", "a0", "a1", "b0", "c0", "a3", "a4"]


async def test_a_process_that_gives_a_call_up_and_tries_again_keeps_its_turn() -> None:
    async with desk_of() as desk:
        ended: list[str] = []
        first = desk.register("a0", caller="a")
        await desk.begun()
        waiting = []
        for name in ("b0", "c0", "b1"):
            waiting.append(desk.register(name, caller=name[0]))
            waiting[-1].set_name(name)
            waiting[-1].add_done_callback(lambda task: ended.append(task.get_name()))
        await asyncio.sleep(0)  # all wait
        waiting[0].cancel()
        desk.permit(6)
        await asyncio.gather(first, *waiting, return_exceptions=True)
        assert ended == ["b0", "b1", "c0"]


async def test_a_caller_that_goes_away_is_served_to_the_end_or_not_at_all() -> None:
    async with desk_of() as desk:
        begun, waiting = desk.register("begun"), desk.register("waiting")
        await desk.begun()
        for task in (begun, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        desk.permit()
        assert (await desk.register("begun")).existed
        assert desk.names == ["begun"]


async def test_closing_waits_for_what_has_begun_and_refuses_what_has_not() -> None:
    async with desk_of() as desk:
        begun, waiting = desk.register("begun"), desk.register("waiting")
        await desk.begun()
        closing = asyncio.get_running_loop().create_task(desk.registrar.close())
        await asyncio.sleep(0)
        assert not closing.done()
        desk.permit()
        await closing
        assert begun.done()
        with pytest.raises(Unavailable, match="stops"):
            await waiting
        assert desk.names == ["begun"]


async def test_pools_of_a_device_that_loses_its_memory_while_they_are_made_serve_nobody() -> None:
    """Some of their slabs were made before: they would be another process's memory, which is no more."""
    async with desk_of() as desk:
        first = desk.register("model")
        await desk.begun()
        desk.permit(1)
        await desk.begun()
        desk.node.on_device_lost("shm-0", "its mover has ended")
        await asyncio.sleep(0)
        desk.permit(1)
        with pytest.raises(Unavailable, match="register again"):
            await first
        desk.permit(2)
        await desk.register("model")
        (model,) = desk.core.ledger.models.values()
        assert [replica.id for replica in model.replicas] == [1]
        assert [replica.id for replica in model.lost] == [0]
        assert not desk.vault.has_replica(model.id, 0)
        assert desk.vault.has_replica(model.id, 1)
        assert desk.free[0] == 0, "the lost pools have made room"


async def test_a_device_that_is_being_waited_for_keeps_no_other_one_waiting() -> None:
    """The models are each one's own, and one of them is both's: it comes with its first replica."""
    async with desk_of(2) as desk:
        slow = desk.register("shared")
        await desk.begun()
        behind = desk.register("behind")
        other = await desk.register("shared", device="shm-1", pages=(16, 16))
        alone = await desk.register("alone", device="shm-1", pages=(16, 16))
        assert not slow.done()
        assert not behind.done()
        assert (other.existed, desk.names) == (False, ["shared", "alone"])
        assert [replica.devices for replica in other.model.replicas] == [("shm-1",)]
        assert alone.model is not other.model
        desk.permit(2)
        first = await slow
        assert first.model is other.model
        assert sorted(replica.id for replica in first.model.replicas) == [0, 1]
        assert [replica.place.number - 1 for replica in first.model.replicas] == [1, 0]
        behind.cancel()


async def test_memory_that_is_being_made_counts_for_those_that_plan_beside_it() -> None:
    """Neither the host's pages nor the tenant's are given twice, and a model with a replica on its way is not idle."""
    async with desk_of(2) as desk:
        made = await desk.register("old", device="shm-1", pages=(16, 16))
        made.model.expected = 0
        slow = desk.register("old")
        await desk.begun()
        every_page = HOST_BYTES // sum(map(LAYOUT.host_page_bytes, range(2)))
        request = desk.request("new", (16, 16), "shm-1", every_page)
        with pytest.raises(PoolExhausted, match="host"):
            await desk.registrar.register(request, "b")
        assert memory_of([made.model]).device_bytes == POOL_BYTES + device_bytes(LAYOUT, (16, 16))
        desk.permit(2)
        assert (await slow).model is made.model
        assert desk.names == ["old"]


async def test_a_model_of_which_one_replica_cannot_be_made_stays_with_the_other_one() -> None:
    async with desk_of(2) as desk:
        free = desk.free[1]
        slow = desk.register("m")
        await desk.begun()
        other = await desk.register("m", device="shm-1", pages=(16, 16))
        desk.backend.breaks = Unavailable("no memory")
        desk.permit(1)
        with pytest.raises(Unavailable, match="no memory"):
            await slow
        assert (desk.names, other.model.coming) == (["m"], {})
        assert desk.free[1] == free - 2 * 4096
        desk.backend.breaks = None
        desk.permit(2)
        again = await desk.register("m")
        assert (again.model, again.replica.id) == (other.model, 2), "a number is never given twice"


async def test_a_model_whose_only_replica_cannot_be_made_leaves_no_host_memory_taken() -> None:
    async with desk_of() as desk:
        free = desk.free
        desk.backend.breaks = Unavailable("no memory")
        desk.permit(1)
        with pytest.raises(Unavailable, match="no memory"):
            await desk.register("m")
        assert (desk.names, desk.free, desk.core.ledger.coming) == ([], free, {})


async def test_no_idle_model_leaves_for_a_device_that_does_not_answer() -> None:
    async with desk_of() as desk:
        desk.permit()
        (await desk.register("idle")).model.expected = 0
        desk.backend.silent.add("shm-0")
        with pytest.raises(Unavailable, match="does not answer"):
            await desk.register("new")
        assert desk.names == ["idle"]


async def test_one_that_wants_two_devices_is_passed_by_none_that_wants_one_of_them() -> None:
    async with desk_of(2) as desk:
        ended: list[str] = []

        def register(request: RegisterRequest) -> asyncio.Task[Registered]:
            task = asyncio.get_running_loop().create_task(desk.registrar.register(request, request.name))
            task.add_done_callback(lambda _: ended.append(request.name))
            return task

        small = PoolRequest((8,)), PoolRequest((8,))
        wide = RegisterRequest(
            "both", two_ranks(16), devices=("shm-0", "shm-1"), device_pool=small[0], host_pool=small[1]
        )
        first = desk.register("first", (8, 8))
        await desk.begun()
        tasks = [register(wide), register(desk.request("late", (8, 8), "shm-1"))]
        await asyncio.sleep(0)
        desk.permit(3)
        await asyncio.gather(first, *tasks)
        assert ended == ["both", "late"]
