"""The daemon's own mover in one process: backend, link costs, host pool and swap engine, without the daemon around."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvcache.v1.status_pb2 import DeviceStatus

from cachesvc.config import Config
from cachesvc.hardware import choose_hardware, measure_links
from cachesvc.memory.host_pool import MAX_CHUNK_BYTES, HostPool, HostSlab
from cachesvc.memory.interface import Slab
from cachesvc.model.layout import Layout, Plane, PlaneGroup, device_geometry
from cachesvc.swap.engine import SwapEngine

WAIT_SECONDS = 120.0
HOST_THREADS = {"shm": 2, "cuda": 8}
OnDone = Callable[[int, Exception | None], None]


class Mover:
    """``start`` takes and touches the host memory; the first process that touches a device page of shm pays for it.
    ``movers``: threads of this process, or a process of their own, as the daemon's flag has it. ``devices``: how many
    of ``shm``; of GPUs all that there are. ``device_bytes`` are of each. ``memory``: how GPU pools are mapped, as the
    daemon's flag has it; empty: its default.

    Raises CacheError when made where there is no such backend, and at ``start`` where memory is missing.
    """

    def __init__(
        self,
        backend: str,
        device_bytes: int,
        host_bytes: int,
        *,
        slice_bytes: int | None = None,
        movers: str = "inside",
        devices: int = 1,
        memory: str = "",
    ) -> None:
        self.config = Config(
            backend=backend,
            device_pool=device_bytes,
            host_pool=host_bytes,
            host_threads=HOST_THREADS[backend],
            slice_bytes=slice_bytes or Config().slice_bytes,
            movers=movers,
            shm_devices=devices,
            device_memory=memory or Config().device_memory,
        )
        self.hardware = choose_hardware(self.config)
        self.backend = self.hardware.backend
        self.devices = self.backend.devices()
        self.device = self.devices[0]
        self.link: dict[str, object] = {}
        self._engine: SwapEngine | None = None
        self._on_done: OnDone = _nobody
        sizes = host_bytes, min(MAX_CHUNK_BYTES, host_bytes), self.config.host_threads
        in_files = self.hardware.has_processes
        self.host = HostPool(*sizes, self.hardware.nodes, self.backend, in_files=in_files)

    @property
    def gpu(self) -> str:
        """The UUID of the GPU, or nothing."""
        return self.device if self.config.backend == "cuda" else ""

    def start(self) -> None:
        """Start the backend, measure the link, and wait for the whole host pool."""
        self.backend.start()
        lines: list[DeviceStatus] = []
        measure_links(self.config, self.hardware, lines.append)
        self.link = {field.name: value for field, value in lines[0].ListFields()} if lines else {}
        self.host.start()
        self.host.join_filling()
        if self.host.failure is not None:
            raise self.host.failure

    def close(self) -> None:
        """Stop all."""
        if self._engine is not None:
            self._engine.close()
        self.backend.close()
        self.host.close()

    def slab(self, layout: Layout, pages: int, device: str = "") -> Slab:
        """A slab for ``pages`` pages of a layout of one group, on the first device where none is named."""
        return self.backend.create_slab(device or self.device, device_geometry(layout, 0, pages).total_bytes)

    def reserve(self, layout: Layout, pages: int, device: str = "") -> HostSlab:
        """Host pages, zeroed and usable, near a device where one is named."""
        slab = self.host.reserve(layout.page_bytes(0), pages, device, frozenset({device or self.device}))
        come = threading.Event()
        ready = self.host.ready_pages(slab, lambda _: come.set())
        while sum(run.count for run in ready) < pages:
            come.wait(WAIT_SECONDS)
            come.clear()
            ready = self.host.ready_pages(slab)
        return slab

    def _ended(self, ticket: int, error: Exception | None) -> None:
        self._on_done(ticket, error)

    def engine(self, layout: Layout, host: HostSlab, slab: Slab, pages: int, on_done: OnDone) -> SwapEngine:
        """The started engine, with one model and one replica, both number 0; the model before must be detached."""
        engine = self.bare_engine(on_done)
        engine.attach_model(0, layout, [[host]])
        engine.attach_replica(0, 0, [self.device], [[slab]], [pages])
        return engine

    def bare_engine(self, on_done: OnDone) -> SwapEngine:
        """The started engine, with the models that it has; it reports ends to ``on_done`` from now on."""
        self._on_done = on_done
        if self._engine is None:
            self._engine = SwapEngine(self.hardware.movers, self._ended)
            self._engine.start()
        return self._engine


def _nobody(ticket: int, error: Exception | None) -> None:
    raise AssertionError(f"ticket {ticket} ended before the benchmark waited ({error})")


class Arrivals:
    """Counts jobs that have ended, and keeps the first error."""

    def __init__(self) -> None:
        self._ended = threading.Semaphore(0)
        self._error: Exception | None = None

    def done(self, ticket: int, error: Exception | None) -> None:
        """The end of a job."""
        del ticket
        self._error = self._error or error
        self._ended.release()

    def wait(self, jobs: int) -> None:
        """Until ``jobs`` more have ended. Raises what broke, or TimeoutError."""
        for _ in range(jobs):
            if not self._ended.acquire(timeout=WAIT_SECONDS):
                raise TimeoutError(f"a copy did not end within {WAIT_SECONDS:g} s")
        if self._error is not None:
            raise self._error


def two_plane_layout(layers: int, width: int, ranks: int = 1) -> Layout:
    """Planes ``k`` and ``v`` of ``width`` bytes a block in each layer and on each rank."""
    planes = tuple(Plane(name, layer, "full", (width,), "uint8") for layer in range(layers) for name in ("k", "v"))
    return Layout(64, ranks, (PlaneGroup("full"),), planes)
