"""Cases of ``benchmarks.loop.rounds``: each sets up, and does its work within ``site.measured``."""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
import signal
import socket as sockets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import grpc
import numpy as np
from cachesvc_client import CacheClient, CacheClientError
from cachesvc_client.aio import AsyncCacheClient
from cachesvc_ctl.core.daemon_process import DaemonProcess
from kvcache.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc, inspect_pb2

from benchmarks.support.calls import compute, leased
from benchmarks.support.movers import movers_of
from cachesvc.model.layout import Layout, Plane, PlaneGroup

LAYOUT = Layout(4, 1, (PlaneGroup("full"),), (Plane("k", 0, "full", (8,), "uint8"),))
WIDE = Layout(4, 1, (PlaneGroup("full"),), (Plane("k", 0, "full", (4096,), "uint8"),))
KEY_BYTES = 32
ALONE_SECONDS = 4.0
GROWN_A_STEP = 64
THROUGH = ("--write-policy", "write_through", "--ahead-pages", "0")


class Site:
    """The daemon of a case. ``began``, ``ended``: of what is measured. ``figures``: further ones, in milliseconds."""

    def __init__(self, daemon: DaemonProcess, clock: Callable[[], float]) -> None:
        self.daemon = daemon
        self.socket = daemon.socket
        self.rng = np.random.default_rng(1)
        self.figures: dict[str, float] = {}
        self.began = self.ended = 0.0
        self._clock = clock
        self.channel = grpc.insecure_channel(f"unix:{daemon.socket}")
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Leave the engine beside alone for a while, then measure."""
        time.sleep(ALONE_SECONDS)  # its steps alone
        self.began = self._clock()
        yield
        self.ended = self._clock()

    def keys(self, blocks: int) -> bytes:
        """Keys that nothing else has."""
        return self.rng.bytes(KEY_BYTES * blocks)

    def settle(self) -> None:
        """Wait until no transfer runs, and the host pool is there."""
        while True:
            found = self.admin.GetStatus(admin_pb2.GetStatusRequest())
            running = found.transfers.running_stores + found.transfers.running_loads
            if not running and found.host_pool_ready_bytes == found.host_pool_bytes:
                return
            time.sleep(0.05)  # between two looks


class Case(NamedTuple):
    """A name, the daemon's flags, and what is done."""

    name: str
    run: Callable[[Site], None]
    flags: tuple[str, ...] = ()


def publishes(site: Site) -> None:
    """200 publishes of 2,048 blocks of one process, and Allocates of 1,024 of another."""
    count, blocks = 200, 2048
    with leased(site.socket, LAYOUT, 3000, name="other") as lease:
        times: list[float] = []
        ready, ended = threading.Event(), threading.Event()

        async def publish_all() -> None:
            async with AsyncCacheClient(site.socket, engine="many") as many:
                pages = [count * blocks + 8]
                mine = await many.open_lease(await many.register("many", LAYOUT, device_pages=pages, host_pages=[0]))
                held = []
                for _ in range(count):
                    sequence = await mine.match(site.keys(blocks))
                    await sequence.allocate(blocks)
                    held.append(sequence)
                ready.set()
                await asyncio.to_thread(begun.wait)
                answers = await asyncio.gather(*(each.publish(blocks) for each in held), return_exceptions=True)
                site.figures["refused"] = sum(isinstance(each, BaseException) for each in answers)
                ended.set()

        begun = threading.Event()
        thread = threading.Thread(target=asyncio.run, args=(publish_all(),))
        thread.start()
        ready.wait()
        with site.measured():
            begun.set()
            while not ended.is_set():
                with lease.match(site.keys(1024)) as sequence:
                    began = time.perf_counter()
                    sequence.allocate(1024)
                    times.append((time.perf_counter() - began) * 1e3)
        thread.join()
        site.figures["allocate_ms"] = max(times)


def single_pages(site: Site, blocks: int, *, swap: bool) -> None:
    """A load, or a swap, of a sequence whose pages lie one by one."""
    with leased(site.socket, LAYOUT, 2 * blocks + 8, 3 * blocks, "long") as lease:
        site.settle()
        prompt = site.keys(blocks)
        compute(lease, prompt)
        site.settle()
        site.admin.Evict(admin_pb2.EvictRequest(tier="device", blocks=0, model_id=lease.registration.model_id))
        one, two = lease.match(b""), lease.match(b"")
        with lease.step() as stream:
            for first in range(1, blocks + 1, GROWN_A_STEP):  # in turns, so that each has every other page
                batch = stream.batch()
                for grown in range(first, min(first + GROWN_A_STEP, blocks + 1)):
                    batch.allocate(one, grown)
                    batch.allocate(two, grown)
                stream.submit(batch)
        if swap:
            with site.measured():
                one.swap_out()
                one.wait_swapped()
                one.swap_in()
                one.wait_swapped()
        else:
            two.release()
            with site.measured():
                loaded = lease.match(prompt)
                loaded.allocate(blocks)
                loaded.wait_loaded()
                loaded.release()


def long_steps(site: Site) -> None:
    """Steps of as many operations as may be, each refused."""
    with leased(site.socket, LAYOUT, 5000, name="steps") as lease, site.measured():
        stub = cache_pb2_grpc.CacheServiceStub(site.channel)

        def requests() -> Iterator[cache_pb2.StepRequest]:
            for number in range(1, 6):
                request = cache_pb2.StepRequest(lease_id=lease.id, request_id=number)
                for sequence in range(1, 4097):
                    wanted = request.operations.add().allocate
                    wanted.sequence_id, wanted.blocks, wanted.lease_id = sequence, 7, "y" * 30
                yield request

        for answer in stub.Step(requests()):
            assert answer.results or answer.error.code


def refusals(site: Site) -> None:
    """Allocates on a full pool, beside many transfers of another replica of the model."""
    with CacheClient(site.socket, engine="full") as client:
        many = client.open_lease(
            client.register("full", WIDE, device_pages=[20000], host_pages=[20000], devices=["shm-0"])
        )
        few = client.open_lease(client.register("full", WIDE, device_pages=[16], devices=["shm-1"]))
        site.settle()
        first, second = few.match(b""), few.match(b"")
        first.allocate(16)
        for _ in range(1500):
            compute(many, site.keys(4))
        with site.measured():
            for _ in range(200):
                with suppress(CacheClientError):
                    second.allocate(4)


def computing(site: Site) -> None:
    """A Match of a prompt of 65,536 blocks that another sequence computes."""
    with leased(site.socket, LAYOUT, 70_000, 0, "computing") as lease:
        prompt = site.keys(65536)
        one = lease.match(prompt)
        one.allocate(65536)
        with site.measured():
            for _ in range(20):
                lease.match(prompt).release()


def mover_dies(site: Site) -> None:
    """A mover dies with many loads under way."""
    with CacheClient(site.socket, engine="dying") as client:
        registration = client.register("dying", WIDE, device_pages=[20000], host_pages=[20000], devices=["shm-0"])
        lease = client.open_lease(registration)
        site.settle()
        prompts = [site.keys(16) for _ in range(900)]
        for prompt in prompts:
            compute(lease, prompt)
        site.settle()
        site.admin.Evict(admin_pb2.EvictRequest(tier="device", blocks=0, model_id=registration.model_id))
        for prompt in prompts:
            with suppress(CacheClientError):
                lease.prefetch(prompt)
        with site.measured():
            os.kill(movers_of(site.daemon.process.pid)["shm-0"], signal.SIGKILL)
            time.sleep(2.0)  # the daemon's work is measured, beside the engine


def lost_leases(site: Site) -> None:
    """A process with 1,000 leases is killed."""
    context = mp.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=hold_leases, args=(site.socket, theirs))
    process.start()
    site.figures["leases"] = mine.recv()
    with site.measured():
        process.kill()
        process.join()
        time.sleep(2.0)  # as above


def hold_leases(socket: str, pipe: mp.connection.Connection) -> None:
    """Hold leases with a few pages each until killed."""
    with CacheClient(socket, engine="many leases") as client:
        registration = client.register("many leases", LAYOUT, device_pages=[20000], host_pages=[0])
        held = []
        with suppress(CacheClientError):
            for _ in range(1000):
                lease = client.open_lease(registration)
                sequence = lease.match(b"")
                sequence.allocate(4)
                held.append(lease)
        pipe.send(len(held))
        signal.pause()


def wanted(site: Site) -> None:
    """More blocks than storage takes: the list of those to be written is full."""
    with leased(site.socket, LAYOUT, 100_000, 100_000, "wanted") as lease:
        site.settle()
        for _ in range(140):
            compute(lease, site.keys(512))
        with site.measured():
            for _ in range(60):
                compute(lease, site.keys(512))


def questions(site: Site) -> None:
    """GetStatus and the index of large models."""
    with CacheClient(site.socket, engine="asked") as client:
        registration = client.register("asked", LAYOUT, device_pages=[300000], host_pages=[0])
        lease = client.open_lease(registration)
        for _ in range(120):
            compute(lease, site.keys(2048))
        many = [client.open_lease(registration) for _ in range(8)]
        held = [lease.match(b"") for lease in many for _ in range(4096)]
        with site.measured():
            for _ in range(5):
                site.admin.GetStatus(admin_pb2.GetStatusRequest(brief=True))
                site.admin.ListLeases(admin_pb2.ListLeasesRequest())
            for _ in site.admin.DumpIndex(inspect_pb2.DumpIndexRequest(model_id=registration.model_id)):
                pass
        del held


def connections(site: Site) -> None:
    """Life connections that come and go, beside many that stay."""
    path = site.socket + ".life"

    def connect() -> sockets.socket:
        each = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
        each.connect(path)
        each.recv(64)
        return each

    kept = [connect() for _ in range(200)]
    with site.measured():
        for _ in range(500):
            connect().close()
    for each in kept:
        each.close()


def learned(site: Site) -> None:
    """Matches of long prompts that have left the cache, under eviction that learns."""
    with leased(site.socket, LAYOUT, 5_000, 0, "learned") as lease:
        prompts = [site.keys(2048) for _ in range(6)]

        def serve_all() -> None:
            for prompt in prompts:
                sequence = lease.match(prompt)
                sequence.allocate(2048)
                if sequence.sealed_blocks < 2048:
                    sequence.publish(2048)
                sequence.release(output_tokens=64)

        serve_all()
        with site.measured():
            for _ in range(3):
                serve_all()


CASES = (
    Case("publishes", publishes, ("--host-pool", "0", "--ahead-pages", "0")),
    Case("load 8,192", lambda site: single_pages(site, 8192, swap=False), (*THROUGH, "--host-pool", "64MiB")),
    Case("swap 8,192", lambda site: single_pages(site, 8192, swap=True), (*THROUGH, "--host-pool", "64MiB")),
    Case("load 65,536", lambda site: single_pages(site, 65536, swap=False), (*THROUGH, "--host-pool", "64MiB")),
    Case("swap 65,536", lambda site: single_pages(site, 65536, swap=True), (*THROUGH, "--host-pool", "64MiB")),
    Case("steps of 4,096", long_steps, ("--host-pool", "0")),
    Case(
        "refused Allocates",
        refusals,
        (*THROUGH, "--host-pool", "128MiB", "--shm-devices", "2", "--store-limit", "64KiB", "--slice-bytes", "1MiB"),
    ),
    Case("computing 65,536", computing, ("--host-pool", "0")),
    Case(
        "a mover dies",
        mover_dies,
        (*THROUGH, "--host-pool", "128MiB", "--movers", "process", "--shm-devices", "2", "--load-limit", "64KiB"),
    ),
    Case("lost leases", lost_leases, ("--host-pool", "0")),
    Case(
        "wanted",
        wanted,
        (
            *THROUGH,
            "--host-pool",
            "64MiB",
            "--storage",
            "file:{folder}/st?capacity=100MiB&write=through&write_rate=4KiB",
        ),
    ),
    Case("questions", questions, ("--host-pool", "0", "--lease-seconds", "120")),
    Case("connections", connections, ("--host-pool", "0")),
    Case("hazard", learned, ("--host-pool", "0", "--ahead-pages", "0", "--eviction", "hazard")),
)
