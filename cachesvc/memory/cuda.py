"""Device memory on NVIDIA GPUs: slabs that engines map by CUDA IPC, copies by copy engines, words on both sides.

No kernel is ever launched here: kernels of two processes share a GPU by turns, so each would stop the engines. (Fresh
slabs are zeroed by the driver's memset, when a model is registered.)
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, Self

from cachesvc.memory.arbiter import CopyRules
from cachesvc.memory.backend import Device, LocalBackend, refused_of
from cachesvc.memory.copy_thread import Clock
from cachesvc.memory.extents import address_of
from cachesvc.memory.host_pool import Neighbours
from cachesvc.memory.interface import Handle, Slab, SlabBudget, Slice
from cachesvc.memory.memcpy import PitchedCopies, Region, Regions
from cachesvc.memory.timeline import TIMELINE_WORDS, TOKEN_BYTES, HostTimeline, MappedSheet
from cachesvc.model.errors import InvalidRequest, Unavailable
from cachesvc.model.futex import WORD_BYTES
from cachesvc.model.words import Direction

SPARE_BYTES = 64 << 20
"""Left of a device beside the pool, for what rounding slabs up to 2 MiB takes, and for checks of its links."""
ANSWER_S = 5.0
"""The longest that ``probe`` waits for GPUs to say that they work; they go on, and are not asked again meanwhile."""
LOOK_S = 2.0
"""Between looks at the last copies, while they are waited for."""


@dataclass
class CudaGpu(Device):
    gpu: GpuDevice
    queues: list[GpuQueue]
    health: GpuHealth


class CudaBackend(LocalBackend[CudaGpu]):
    """``gpus`` are not started yet; slabs take up to ``device_bytes`` of each. ``vmm``: slabs travel as descriptors."""

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
        super().__init__([gpu.uuid for gpu in gpus], device_bytes, timeline_words, rules, clock, neighbours)
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._vmm = vmm
        self._health = {uuid: GpuHealth(uuid) for uuid in self._gpus}
        self._reach: set[tuple[str, str]] = set()
        self._refused: dict[tuple[str, str], str] = {}
        self._pins: dict[int, tuple[memoryview, str]] = {}  # by region: host memory, and whose driver calls pinned it
        self._peers: dict[int, GpuMemory] = {}
        self._asked: dict[str, threading.Thread] = {}

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

    def _working(self, device: str) -> CudaGpu:
        at = self._running_device(device)
        at.health.check()
        return at

    def _attempt(self, at: CudaGpu, call: Callable[[], object]) -> None:
        at.health.attempt(call)

    def _free_bytes(self, at: CudaGpu) -> int:
        return at.gpu.free_bytes()

    def _allocate(self, at: CudaGpu, size_bytes: int, charged_bytes: int) -> Slab:
        try:
            memory = at.gpu.allocate(size_bytes, vmm=self._vmm)
        except RuntimeError as error:
            raise Unavailable(f"GPU {at.name} gives no memory: {error}; nvidia-smi may say why") from error
        region = Region(memory.address, size_bytes, fetch=at.gpu.read)
        return self._add_slab(at, region, handle_of(memory, size_bytes), memory.fd, charged_bytes, memory.close)

    def can_reach(self, source: str, target: str) -> bool:
        """True where the hardware can. VMM slabs are open to their own GPU alone."""
        return super().can_reach(source, target) and (source == target or (source, target) in self._reach)

    def refused_peers(self) -> dict[tuple[str, str], str]:
        """Pairs of GPUs whose copies failed their check at the start."""
        return dict(self._refused)

    def fault(self, device: str) -> str:
        self._check(device)
        return self._health[device].reason

    def require_answer(self, device: str) -> None:
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
        region = self._add_region(Region(address, buffer.nbytes, buffer))
        self._pins[region] = buffer, gpu.uuid
        return region

    def open_peer(self, handle: Handle, fd: int | None) -> int:
        """Map another process's slab for this GPU's copies. Raises Unavailable where it cannot."""
        self._check_running()
        gpu = next(iter(self._gpus.values()))
        try:
            memory = gpu.open_memory(handle.token, fd, handle.size_bytes)
        except RuntimeError as error:
            raise Unavailable(f"GPU {gpu.uuid} does not reach the other one's memory: {error}") from error
        region = self._add_region(Region(memory.address, handle.size_bytes, fetch=gpu.read))
        self._peers[region] = memory
        return region

    def close_peer(self, region: int) -> None:
        self._drop_region(region)
        next(iter(self._health.values())).attempt(self._peers.pop(region).close)

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
        for region, (buffer, uuid) in self._pins.items():
            self._holds.end(region)
            if is_quiet:  # else copies may be on their way to it
                self._health[uuid].attempt(partial(self._gpus[uuid].unregister_host, address_of(buffer)))
        if is_quiet:
            self._pins.clear()
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

    def _open(self, uuid: str, gpu: GpuDevice) -> CudaGpu:
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
        copying = self._copying(uuid, runners, peers, timeline)
        return CudaGpu(uuid, timeline, copying, SlabBudget(uuid, self._device_bytes), gpu, queues, health)

    def _open_peers(self) -> None:
        for source, target in itertools.permutations(self._gpus.values() if not self._vmm else (), 2):
            if target.can_reach(source):
                target.open_peer(source)
                self._reach.add((source.uuid, target.uuid))


def handle_of(memory: GpuMemory, size_bytes: int) -> Handle:
    """Handle by which another process maps the memory. A VMM allocation is mapped whole."""
    if memory.handle:
        return Handle("cuda_ipc", memory.handle, size_bytes)
    return Handle("cuda_fd", secrets.token_bytes(TOKEN_BYTES), memory.size_bytes)


SLICES_ON_WAY = 2
"""While one is copied the next is submitted: the link never waits for this process, which can still change its mind."""


class CudaSheet(MappedSheet):
    """Words in pinned host memory: this GPU's streams write them, those of the model's engines wait for them.

    Measured against words on the device (H100, 2026-11): a waiting stream goes on 16 us after the write either way, a
    wait that is met costs 4.5 against 4.3 us, and waiting streams take nothing of the link. But processors read them
    at once, and a client whose daemon died can end its streams' waits with a store; from the device's side it may not:
    with 128 streams waiting, one more stream to release them never gets its turn.
    """

    def __init__(self, gpu: GpuDevice, words: int, fd: int | None = None) -> None:
        """``fd``: as of ``MappedSheet``. Raises OSError, RuntimeError."""
        super().__init__(words, is_shared=True, fd=fd)
        self._gpu = gpu
        with ExitStack() as undo:
            undo.callback(super().close)
            gpu.register_host(self.address, words * WORD_BYTES)
            undo.callback(gpu.unregister_host, self.address)
            self._base = gpu.device_address(self.address)
            undo.pop_all()
        self._is_pinned = True

    def place(self, word: int) -> int:
        """Address of a word for the GPU."""
        return self._base + WORD_BYTES * word

    def close(self) -> None:
        try:
            if self._is_pinned:
                self._is_pinned = False
                self._gpu.unregister_host(self.address)
        finally:
            super().close()


class _OnWay(NamedTuple):
    """A slice that was queued, and the word that moves with it."""

    mark: GpuMark
    word: int | None


class CudaRunner:
    depth = SLICES_ON_WAY
    only_queues = True

    def __init__(
        self,
        queue: GpuQueue,
        timeline: HostTimeline,
        regions: Callable[[], Regions],
        health: GpuHealth,
    ) -> None:
        self._queue = queue
        self._timeline = timeline
        self._regions = regions
        self._health = health

    def begin(self) -> None:
        """No-op: calls make the context current by themselves."""

    def submit(self, piece: Slice) -> _OnWay:
        """Queue the copies and the word. Raises CopyOutOfBounds, RuntimeError, and Unavailable once the GPU has broken;
        nothing is on its way then."""
        self._health.check()
        copies = self._regions().addressed(piece.copies)
        word = piece.job.word if piece.word_value is not None else None
        words = [] if word is None or piece.word_value is None else [(self._timeline.place(word), piece.word_value)]
        try:
            return _OnWay(self._queue.submit(copies, words), word)
        except RuntimeError as error:
            self._settle(error)
            raise

    def wait(self, started: object) -> None:
        """Wait for the mark, then wake the waiters of its word. Raises RuntimeError, and Unavailable once the GPU has
        broken."""
        assert isinstance(started, _OnWay)
        try:
            started.mark.wait()
            if started.word is not None:
                self._timeline.wake(started.word)
        except RuntimeError as error:
            self._settle(error)
            raise
        finally:
            started.mark.close()

    def _settle(self, error: RuntimeError) -> None:
        """Wait for what may be on its way. Where that breaks too, it was not one call alone: raises Unavailable."""
        try:
            self._queue.synchronize()
        except RuntimeError:
            self._health.broke(error)
            self._health.check()


# Health of a GPU for this process. After a fault on the device every call of CUDA fails, in this process and for good:
# the log says so once, and nothing is tried again. One that hangs is not even called to give something back: the call
# would not return.

log = logging.getLogger(__name__)


class GpuHealth:
    """``reason``: why the GPU no longer works; empty while it does."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self.reason = ""
        self.hangs = False
        self._lock = threading.Lock()

    def broke(self, error: Exception) -> None:
        """The GPU does not work any more; the first ``error`` is the reason."""
        with self._lock:
            is_news = not self.reason
            self.reason = self.reason or str(error) or type(error).__name__
        if is_news:
            log.error("gpu_broken device=%s reason=%s", self._uuid, self.reason)

    def hung(self, why: str) -> None:
        """Note that the GPU does not answer any more."""
        self.hangs = True
        self.broke(RuntimeError(why))

    def check(self) -> None:
        """Raise Unavailable once the GPU has broken."""
        if self.reason:
            raise Unavailable(
                f"GPU {self._uuid} no longer works for this daemon ({self.reason}); recompute, and restart the daemon"
            )

    def attempt(self, call: Callable[[], object]) -> None:
        """Ask something or give it back; where the GPU cannot any more, what comes after is done all the same."""
        if self.hangs:
            return
        try:
            call()
        except RuntimeError as error:
            self.broke(error)


# Seam between the CUDA backend and a GPU. ``gpu_ops`` fills it on real hardware; it comes in through the composition
# root.


class GpuMemory(Protocol):
    """Device memory that other processes can map: by its legacy ``handle`` of 64 bytes, or where that is empty by
    ``fd``, the descriptor of a VMM allocation, open until ``close``. At least the requested bytes."""

    address: int
    size_bytes: int
    handle: bytes
    fd: int | None

    def close(self) -> None:
        """Give it back, once; mappings of other processes stay valid."""


class GpuMark(Protocol):
    """Point on a queue."""

    def wait(self) -> None:
        """Sleep until the queue has come here. Raises RuntimeError for what broke on the way."""

    def close(self) -> None:
        """Release the mark."""


class GpuQueue(Protocol):
    """Copies by copy engines alone, and words and marks behind them. Copies may pass one another: none may need what
    another brings unless the caller has waited between them. Failures raise RuntimeError."""

    def start(self) -> None:
        """Make the stream."""

    def submit(self, copies: PitchedCopies, words: Sequence[tuple[int, int]]) -> GpuMark:
        """Queue copies; once they and everything before are done, set each word (address, value) in order.

        When this raises, some of it may be on its way.
        """

    def synchronize(self) -> None:
        """Wait until everything is done."""

    def close(self) -> None:
        """Wait, and release the stream. Idempotent."""


class GpuDevice(Protocol):
    """One GPU in this process. Failures raise RuntimeError; memory that is not there, MemoryError."""

    uuid: str
    """Name of the GPU in every container and process."""
    context_bytes: int
    """Device memory that ``start`` took for this process."""

    def start(self) -> None:
        """Make its context."""

    def shrink(self) -> None:
        """Give back what the context keeps for kernels: this process runs none."""

    def close(self) -> None:
        """Leave its context. Idempotent."""

    def free_bytes(self) -> int:
        """Free device memory."""

    def allocate(self, size_bytes: int, *, vmm: bool) -> GpuMemory:
        """Zeroed memory. Raises MemoryError."""

    def open_memory(self, handle: bytes, fd: int | None, size_bytes: int) -> GpuMemory:
        """Map what another process allocated, on this GPU or one that it reaches: by ``fd``, or else by the handle."""

    def register_host(self, address: int, size_bytes: int) -> None:
        """Pin host memory for the copies of every GPU of this process."""

    def unregister_host(self, address: int) -> None:
        """Unpin host memory."""

    def device_address(self, host_address: int) -> int:
        """Address at which the GPU sees pinned host memory."""

    def read(self, address: int, size_bytes: int) -> bytes:
        """Bytes of device memory, waited for."""

    def can_reach(self, other: Self) -> bool:
        """True where this GPU can copy from and to the other one's memory, not through the host."""

    def open_peer(self, other: Self) -> None:
        """Let what runs on this GPU reach the other one's memory; both are started. Again is fine."""

    def queue(self) -> GpuQueue:
        """A queue that is not started."""
