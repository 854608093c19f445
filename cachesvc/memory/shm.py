"""Device memory without a device: memfd slabs, threads for copy engines, a shared word for the stream's.

It is the default where there is no GPU, and goes through the same planner, timeline and client as CUDA. Other
processes map a slab by its descriptor, which travels over the life socket under the handle's token.
"""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from cachesvc.memory.arbiter import CopyRules
from cachesvc.memory.backend import Device, LocalBackend
from cachesvc.memory.copy_thread import WriteWord
from cachesvc.memory.extents import address_of, map_memfd, sealed_memfd, yield_to_callers
from cachesvc.memory.host_pool import Neighbours
from cachesvc.memory.interface import COPY_FIELDS, CopyBatch, Handle, Slab, SlabBudget, Slice, SliceRunner
from cachesvc.memory.memcpy import Region, Regions
from cachesvc.memory.timeline import TIMELINE_WORDS, TOKEN_BYTES, HostTimeline
from cachesvc.model.errors import Unavailable
from cachesvc.model.words import Direction


class ShmRunner:
    """Copies while it is asked to start: nothing is on its way afterwards."""

    depth = 1
    only_queues = False

    def __init__(self, copy: Callable[[CopyBatch], None], write_word: WriteWord) -> None:
        self._copy = copy
        self._write_word = write_word

    def begin(self) -> None:
        """Let calls go first: copies are made by the processor that serves them."""
        yield_to_callers()

    def submit(self, piece: Slice) -> None:
        """Copy, then set the word. Raises CopyOutOfBounds, with nothing copied."""
        if len(piece.copies):
            self._copy(piece.copies)
        if piece.word_value is not None and piece.job.word is not None:
            self._write_word(piece.job.word, piece.word_value)

    def wait(self, started: object) -> None:
        """No-op: the slice has landed already."""


class ShmBackend(LocalBackend[Device]):
    """``devices`` pretended devices ``shm-0``, ``shm-1``, ... of ``device_bytes`` each.

    ``fault_copies``: the share of copy slices that are made to fail. ``names``: of the devices, where they are others.
    """

    name = "shm"

    def __init__(
        self,
        devices: int,
        device_bytes: int,
        *,
        timeline_words: int = TIMELINE_WORDS,
        rules: CopyRules | None = None,
        fault_copies: float = 0.0,
        names: Sequence[str] = (),
        neighbours: Mapping[str, Neighbours] | None = None,
    ) -> None:
        names = names or [f"shm-{number}" for number in range(devices)]
        super().__init__(names, device_bytes, timeline_words, rules, neighbours=neighbours)
        self._fault_copies = fault_copies

    def start(self) -> None:
        """Make the timelines and start the copy threads of each device."""
        for device in self._names:
            timeline = HostTimeline(self._timeline_words)
            runners = {direction: self._runner(timeline) for direction in Direction}
            copying = self._copying(device, runners, self._runner(timeline), timeline)
            self._devices[device] = Device(device, timeline, copying, SlabBudget(device, self._device_bytes))
            copying.start()
        self._running = True

    def register_host(self, buffer: memoryview, fd: int | None = None) -> int:
        """Make host memory copyable; it must stay mapped until ``close``."""
        del fd
        self._check_running()
        return self._add_region(Region(address_of(buffer), buffer.nbytes, buffer))

    def open_peer(self, handle: Handle, fd: int | None) -> int:
        assert fd is not None
        return self.register_host(map_memfd(fd, handle.size_bytes))

    def close_peer(self, region: int) -> None:
        self._drop_region(region)

    def close(self) -> None:
        """Stop the streams, then free every slab and timeline. Idempotent."""
        self._running = False
        for at in self._devices.values():
            at.copying.close()
        for slab in list(self._slabs.values()):
            slab.close()
        for region in self._regions.known:  # of the host
            self._holds.end(region)
        self._regions = Regions({})
        for at in self._devices.values():
            at.timeline.close()
        self._devices.clear()  # nothing may keep a mapping alive: streams and backend know each other

    def _runner(self, timeline: HostTimeline) -> SliceRunner:
        runner = ShmRunner(self._copy, timeline.write)
        return FaultyRunner(runner, self._fault_copies, secrets.randbits(32)) if self._fault_copies else runner

    def _copy(self, copies: CopyBatch) -> None:
        self._regions.run(copies)

    def _allocate(self, at: Device, size_bytes: int, charged_bytes: int) -> Slab:
        with ExitStack() as undo:
            try:
                fd = sealed_memfd(f"kvcache-{at.name}", size_bytes)
                undo.callback(os.close, fd)
                view = map_memfd(fd, size_bytes)
            except OSError as error:
                raise Unavailable(
                    f"no memory file for a slab on {at.name}: {error}; see ulimit -n and free memory"
                ) from error
            undo.pop_all()
        handle = Handle("memfd", secrets.token_bytes(TOKEN_BYTES), size_bytes)
        return self._add_slab(
            at, Region(address_of(view), size_bytes, view), handle, fd, charged_bytes, partial(os.close, fd)
        )


# Fault injection for copies, for tests of the recovery: enabled by the flag ``--fault-copies`` alone.
#
# A fault is either a slice of which nothing was copied, or one that broke half way: then its target holds some new
# bytes and some old ones, as after a fault of a real copy engine. Its word is not set, and its job fails.

_HEIGHT = COPY_FIELDS.index("height")


class InjectedFault(RuntimeError):
    """A copy was made to fail."""


class FaultyRunner:
    """A runner of which ``rate`` (0 to 1) of the slices fail. Used by one thread at a time, as any runner."""

    def __init__(self, runner: SliceRunner, rate: float, seed: int) -> None:
        self.depth = runner.depth
        self.only_queues = False
        self._runner = runner
        self._rate = rate
        self._rng = random.Random(seed)

    def begin(self) -> None:
        self._runner.begin()

    def submit(self, piece: Slice) -> object:
        """Start the slice, or a half of it and no word. Raises InjectedFault."""
        if self._rng.random() >= self._rate:
            return self._runner.submit(piece)
        half = piece.copies[: (len(piece.copies) + 1) // 2].copy()
        if self._rng.random() < 0.5 or not len(half):
            raise InjectedFault("a copy was made to fail before it began (--fault-copies)")
        half[-1, _HEIGHT] = (half[-1, _HEIGHT] + 1) // 2
        self._runner.wait(self._runner.submit(replace(piece, copies=half, word_value=None)))
        raise InjectedFault("a copy was made to fail half way (--fault-copies)")

    def wait(self, started: object) -> None:
        self._runner.wait(started)
