"""Device memory on NVIDIA GPUs: slabs that engines map by CUDA IPC, copies by copy engines, words on both sides.

No kernel is ever launched here: kernels of two processes share a GPU by turns, so each would stop the engines. (Fresh
slabs are zeroed by the driver's memset, when a model is registered.)
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from cachesvc.memory.copy.arbiter import CopyRules
from cachesvc.memory.copy.copy_thread import Clock, CopyThread, CopyThreads
from cachesvc.memory.copy.host_budget import Neighbours
from cachesvc.memory.copy.peer_check import refused_of
from cachesvc.memory.cuda.health import GpuHealth
from cachesvc.memory.cuda.interface import GpuDevice, GpuMemory, GpuQueue
from cachesvc.memory.cuda.regions import Region, Regions
from cachesvc.memory.cuda.slab import CudaSlab
from cachesvc.memory.cuda.streams import CudaRunner, CudaSheet
from cachesvc.memory.holds import Holds
from cachesvc.memory.interface import Handle
from cachesvc.memory.mapped import address_of
from cachesvc.memory.timeline import TIMELINE_WORDS, HostTimeline
from cachesvc.model.errors import InvalidRequest, NotFound, PoolExhausted, Unavailable
from cachesvc.model.transfer import Direction

SPARE_BYTES = 64 << 20
"""Left of a device beside the pool, for what rounding slabs up to 2 MiB takes, and for checks of its links."""
ANSWER_S = 5.0
"""The longest that ``probe`` waits for GPUs to say that they work; they go on, and are not asked again meanwhile."""
LOOK_S = 2.0
"""Between looks at the last copies, while they are waited for."""


@dataclass
class Device:
    """A GPU at work: its words and streams, and how much of its pool is taken."""

    gpu: GpuDevice
    timeline: HostTimeline
    queues: list[GpuQueue]
    copying: CopyThreads
    health: GpuHealth
    used_bytes: int = 0


class CudaBackend:
    """``gpus`` are not started yet; slabs take up to ``device_bytes`` of each. ``vmm``: slabs travel as descriptors.
    ``neighbours``: views of the node's other GPUs, by GPU."""

    name = "cuda"

    def __init__(
        self,
        gpus: Sequence[GpuDevice],
        device_bytes: int,
        *,
        vmm: bool = False,
        timeline_words: int = TIMELINE_WORDS,
        rules: CopyRules | None = None,
        clock: Clock = time.monotonic,
        neighbours: Mapping[str, Neighbours] | None = None,
    ) -> None:
        self._clock = clock
        self._neighbours = neighbours or {}
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._device_bytes = device_bytes
        self._vmm = vmm
        self._timeline_words = timeline_words
        self._rules = rules or CopyRules()
        self._health = {uuid: GpuHealth(uuid) for uuid in self._gpus}
        self._devices: dict[str, Device] = {}
        self._reach: set[tuple[str, str]] = set()
        self._refused: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._slabs: dict[int, CudaSlab] = {}
        self._holds = Holds()
        self._regions = Regions({})  # replaced, never changed: copy threads read it without the lock
        self._hosts: dict[int, tuple[memoryview, int, str]] = {}  # and whose driver calls pinned it
        self._peers: dict[int, GpuMemory] = {}
        self._asked: dict[str, threading.Thread] = {}
        self._running = False

    def devices(self) -> tuple[str, ...]:
        """UUIDs of the GPUs."""
        return tuple(self._gpus)

    def capacity_bytes(self, device: str) -> int:
        """Bytes that slabs on ``device`` may take in all."""
        self._gpu(device)
        return self._device_bytes

    def start(self) -> None:
        """Make contexts, words and streams. Raises InvalidRequest for a pool that a GPU cannot hold, Unavailable."""
        try:
            for uuid, gpu in self._gpus.items():
                gpu.start()
                gpu.shrink()
                free = gpu.free_bytes()
                if self._device_bytes + SPARE_BYTES > free:
                    raise InvalidRequest(
                        f"a device pool of {self._device_bytes} bytes and {SPARE_BYTES} beside it do not fit "
                        f"GPU {uuid}, which has {free} free; ask for less, or start the daemon before the engines"
                    )
                self._devices[uuid] = self._open(uuid, gpu)
            self._open_peers()
            for device in self._devices.values():
                device.copying.start()
        except (RuntimeError, MemoryError) as error:
            self.close()
            raise Unavailable(
                f"the GPU cannot be used: {error}; see nvidia-smi and ulimit -l, or use --backend shm"
            ) from error
        except BaseException:
            self.close()
            raise
        self._running = True
        self._refused = refused_of(self, self._reach)
        self._reach -= self._refused.keys()

    def create_slab(self, device: str, size_bytes: int) -> CudaSlab:
        """Zeroed memory. Raises PoolExhausted (in bytes) when the budget or the GPU cannot hold it, Unavailable."""
        at = self._device(device)
        at.health.check()
        with self._lock:
            free = self._device_bytes - at.used_bytes
            if not 0 < size_bytes <= free:
                raise self._exhausted(at, size_bytes, free)
            at.used_bytes += size_bytes
        try:
            return self._allocate(at, size_bytes, size_bytes)
        except MemoryError as error:
            self._give_back(at, size_bytes)
            raise self._exhausted(at, size_bytes, min(free, at.gpu.free_bytes())) from error
        except Unavailable:
            self._give_back(at, size_bytes)
            raise

    def create_scratch(self, device: str, size_bytes: int) -> CudaSlab:
        """Zeroed memory out of what is spare beside the budget. Raises Unavailable."""
        at = self._device(device)
        at.health.check()
        try:
            return self._allocate(at, size_bytes, 0)
        except MemoryError as error:
            raise Unavailable(f"GPU {device} has no {size_bytes} bytes left to check its links: {error}") from error

    def _allocate(self, at: Device, size_bytes: int, charged_bytes: int) -> CudaSlab:
        try:
            memory = at.gpu.allocate(size_bytes, vmm=self._vmm)
        except RuntimeError as error:
            raise Unavailable(f"GPU {at.gpu.uuid} gives no memory: {error}; nvidia-smi may say why") from error
        region = self._add_region(Region(memory.address, size_bytes, at.gpu))

        def drop(closed: CudaSlab) -> None:
            self._holds.end(closed.region)  # no address is freed between its look-up and the copy that reads it
            self._drop_region(closed.region)
            self._slabs.pop(closed.region)
            at.health.attempt(memory.close)
            self._give_back(at, charged_bytes)

        slab = self._slabs[region] = CudaSlab(region, memory, size_bytes, drop)
        return slab

    def timeline(self, device: str) -> HostTimeline:
        """The device's words."""
        return self._device(device).timeline

    def open_sheet(self, device: str, sheet: int, fd: int | None = None) -> None:
        """Make words of a model, pinned; or (``fd``) take over what another process made. Raises Unavailable."""
        at = self._device(device)
        at.health.check()
        at.timeline.open(sheet, fd)

    def close_sheet(self, device: str, sheet: int) -> None:
        """Forget a sheet: no copy writes to it any more."""
        self._gpu(device)
        if (at := self._devices.get(device)) is not None:  # None: not running
            at.health.attempt(partial(at.timeline.close_sheet, sheet))

    def load_stream(self, device: str) -> CopyThread:
        """The host -> device stream."""
        return self._device(device).copying.streams[Direction.LOAD]

    def store_stream(self, device: str) -> CopyThread:
        """The device -> host stream."""
        return self._device(device).copying.streams[Direction.STORE]

    def peer_stream(self, device: str) -> CopyThread:
        """The stream for loads from other devices."""
        return self._device(device).copying.peers

    def can_reach(self, source: str, target: str) -> bool:
        """True where the hardware can. VMM slabs are open to their own GPU alone."""
        self._gpu(source)
        self._gpu(target)
        return source == target or (source, target) in self._reach

    def refused_peers(self) -> dict[tuple[str, str], str]:
        """Pairs of GPUs whose copies failed their check at the start."""
        return dict(self._refused)

    def expedite(self, device: str, ticket: int) -> None:
        """A ticket's jobs on the device are awaited now."""
        self._gpu(device)
        if (at := self._devices.get(device)) is not None:  # None: not running
            at.copying.expedite(ticket)

    def pause_background(self, device: str, seconds: float) -> None:
        """Start no slice of background stores for a while."""
        self._gpu(device)
        if (at := self._devices.get(device)) is not None:  # None: not running
            at.copying.pause_background(seconds)

    def limit_copies(self, direction: Direction, bytes_per_second: int) -> None:
        """Set another byte budget for every device."""
        for copying in (at.copying for at in self._devices.values()):
            copying.limit(direction, bytes_per_second)

    def fault(self, device: str) -> str:
        """Reason why the GPU is broken for this process; empty while it works."""
        self._gpu(device)
        return self._health[device].reason

    def has_host(self, device: str, region: int) -> bool:
        """True: chunks are registered for all devices at once."""
        del device, region
        return True

    def tell_hosts(self, on_host: Callable[[str], None]) -> None:
        """No-op, as ``has_host`` says."""

    def lacking_hosts(self) -> dict[str, tuple[int, str]]:
        """Empty, as ``has_host`` says."""
        return {}

    def require_answer(self, device: str) -> None:
        """Raises Unavailable for a GPU that is known not to work."""
        self._health[device].check()

    def probe(self) -> None:
        """Ask every GPU that works for its free memory: one that fell off the bus is known before the next copy. One
        whose copies do not end hangs: they fail. Waits for no answer that takes long."""
        self._look_at_copies()
        asked: list[threading.Thread] = []
        for uuid, at in list(self._devices.items()):
            if not at.health.reason and (uuid not in self._asked or not self._asked[uuid].is_alive()):
                ask = partial(at.health.attempt, at.gpu.free_bytes)
                self._asked[uuid] = threading.Thread(target=ask, name=f"probe-{uuid}", daemon=True)
                self._asked[uuid].start()
                asked.append(self._asked[uuid])
        until = time.monotonic() + ANSWER_S
        for asking in asked:
            asking.join(max(0.0, until - time.monotonic()))

    def register_host(self, buffer: memoryview, fd: int | None = None) -> int:
        """Pin host memory for all GPUs, by the first that works; it must stay mapped until ``close``. Raises
        Unavailable."""
        del fd
        self._check_running()
        working = [gpu for uuid, gpu in self._gpus.items() if not self._health[uuid].reason]
        if not working:
            raise Unavailable("host memory cannot be pinned: no GPU works any more; restart the daemon")
        address, gpu = address_of(buffer), working[0]
        try:
            gpu.register_host(address, buffer.nbytes)
        except RuntimeError as error:
            raise Unavailable(f"host memory cannot be pinned (ulimit -l, or too little of it): {error}") from error
        region = self._add_region(Region(address, buffer.nbytes, None))
        with self._lock:
            self._hosts[region] = (buffer, address, gpu.uuid)
        return region

    def open_peer(self, handle: Handle, fd: int | None) -> int:
        """Map another process's slab for this GPU's copies; returns its region. Raises Unavailable where it cannot."""
        self._check_running()
        gpu = next(iter(self._gpus.values()))
        try:
            memory = gpu.open_memory(handle.token, fd, handle.size_bytes)
        except RuntimeError as error:
            raise Unavailable(f"GPU {gpu.uuid} does not reach the other one's memory: {error}") from error
        region = self._add_region(Region(memory.address, handle.size_bytes, gpu))
        self._peers[region] = memory
        return region

    def close_peer(self, region: int) -> None:
        """Undo ``open_peer``: no copy reads from there any more."""
        self._holds.end(region)
        self._drop_region(region)
        next(iter(self._health.values())).attempt(self._peers.pop(region).close)

    def read(self, region: int, offset: int, size_bytes: int) -> bytes:
        """Bytes of a region, which stays until they are read. Raises NotFound for a region that is unknown or being
        closed, and InvalidRequest for bytes outside of it."""
        with self._holds.hold(region):
            known = self._regions.known[region]
            if offset < 0 or size_bytes < 0 or offset + size_bytes > known.size_bytes:
                raise InvalidRequest(f"bytes [{offset}, {offset + size_bytes}) are outside of {known.size_bytes} bytes")
            if known.gpu is None:
                return bytes(self._hosts[region][0][offset : offset + size_bytes])
            return known.gpu.read(known.address + offset, size_bytes)

    def close(self) -> None:
        """Stop the streams, then free every slab, pin and word; what a broken GPU keeps is logged. Idempotent."""
        self._running = False
        over = threading.Event()
        looking = threading.Thread(target=self._look_until, args=(over,), name="last-looks", daemon=True)
        looking.start()
        for device in self._devices.values():
            device.copying.close()
        over.set()
        looking.join()
        for device in self._devices.values():  # no earlier: a stream may read another device
            for queue in device.queues:
                device.health.attempt(queue.close)
        for slab in list(self._slabs.values()):
            slab.close()
        for region in list(self._peers):
            self.close_peer(region)
        for device in self._devices.values():
            device.health.attempt(device.timeline.close)
        is_quiet = not any(health.hangs for health in self._health.values())
        for region, (_, address, uuid) in self._hosts.items():
            self._holds.end(region)
            if is_quiet:  # else copies may be on their way to it
                self._health[uuid].attempt(partial(self._gpus[uuid].unregister_host, address))
        if is_quiet:
            self._hosts.clear()
        self._devices.clear()
        self._reach.clear()
        self._regions = Regions({})
        for uuid, gpu in self._gpus.items():
            self._health[uuid].attempt(gpu.close)

    def _look_at_copies(self) -> None:
        for at in list(self._devices.values()):
            if not at.health.hangs and (why := at.copying.overdue()):
                at.health.hung(why)
                at.copying.abandon(why)

    def _look_until(self, over: threading.Event) -> None:
        """Root of a thread: copies may hang while their end is waited for."""
        while not over.wait(LOOK_S):
            self._look_at_copies()

    def _open(self, uuid: str, gpu: GpuDevice) -> Device:
        health = self._health[uuid]
        with ExitStack() as undo:
            timeline = HostTimeline(self._timeline_words, partial(CudaSheet, gpu, self._timeline_words))
            queues: list[GpuQueue] = []

            def runner() -> CudaRunner:
                queue = gpu.queue()
                undo.callback(health.attempt, queue.close)
                queue.start()
                queues.append(queue)
                return CudaRunner(queue, timeline, lambda: self._regions, health)

            runners, peers = {way: runner() for way in Direction}, runner()
            undo.pop_all()
        near = self._neighbours.get(uuid)
        copying = CopyThreads(uuid, self._rules, runners, timeline.write, self._clock, peers=peers, neighbours=near)
        return Device(gpu, timeline, queues, copying, health)

    def _open_peers(self) -> None:
        for source, target in itertools.permutations(self._gpus.values() if not self._vmm else (), 2):
            if target.can_reach(source):
                target.open_peer(source)
                self._reach.add((source.uuid, target.uuid))

    def _exhausted(self, at: Device, wanted: int, free: int) -> PoolExhausted:
        return PoolExhausted(
            pool=f"device {at.gpu.uuid} (bytes)",
            wanted=wanted,
            free=free,
            evictable=0,
            pinned=at.used_bytes,
            quarantined=0,
            capacity=self._device_bytes,
        )

    def _give_back(self, at: Device, size_bytes: int) -> None:
        with self._lock:
            at.used_bytes -= size_bytes

    def _add_region(self, region: Region) -> int:
        with self._lock:
            number = next(self._ids)
            self._regions = Regions({**self._regions.known, number: region})
        self._holds.begin(number)
        return number

    def _drop_region(self, number: int) -> None:
        with self._lock:
            self._regions = Regions({one: region for one, region in self._regions.known.items() if one != number})

    def _gpu(self, device: str) -> GpuDevice:
        if device not in self._gpus:
            raise NotFound("device", device, f"this backend has {', '.join(self._gpus)}")
        return self._gpus[device]

    def _device(self, device: str) -> Device:
        self._gpu(device)
        self._check_running()
        return self._devices[device]

    def _check_running(self) -> None:
        if not self._running:
            raise Unavailable("the cuda backend is not running: start it first, and nothing works after close")
