"""Runs a batch of pitched copies on mapped memory, after checking every one against the borders of its
regions.
"""

from __future__ import annotations

import hashlib
import mmap
import secrets
import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cachesvc.memory.extents import Int64s
from cachesvc.memory.interface import Backend, CopyBatch, CopyJob, CopyStep, CopyStream, Slab
from cachesvc.model.errors import CacheError, InvalidRequest, Unavailable


class CopyOutOfBounds(InvalidRequest):
    """A copy reaches beyond its region, or names a region that does not exist (any more): nothing was
    copied."""

    def __init__(self, side: str, copy: list[int], region_bytes: int) -> None:
        super().__init__(f"copy {copy} is outside of its {side} region of {region_bytes} bytes")
        self.side = side
        self.copy = copy
        self.region_bytes = region_bytes


def check_bounds(copies: CopyBatch, region_bytes: Mapping[int, int]) -> None:
    """Raises CopyOutOfBounds for the first copy that is not wholly inside its two regions."""
    sizes = []
    for region in (0, 2):
        named, index = np.unique(copies[:, region], return_inverse=True)
        sizes.append(np.array([region_bytes.get(int(one), -1) for one in named], np.int64)[index])
    check_sizes(copies, sizes[0], sizes[1])


def check_sizes(copies: CopyBatch, src_bytes: Int64s, dst_bytes: Int64s) -> None:
    """Check like ``check_bounds``, with the sizes of each copy's regions, -1 for one that does not exist."""
    width, height = copies[:, 4], copies[:, 5]
    for side, offset, pitch, size in (("source", 1, 6, src_bytes), ("destination", 3, 7, dst_bytes)):
        bad = _is_outside(copies[:, offset], copies[:, pitch], width, height, size)
        if bad.any():
            first = int(np.argmax(bad))
            raise CopyOutOfBounds(side, copies[first].tolist(), int(size[first]))


def _is_outside(offset: Int64s, pitch: Int64s, width: Int64s, height: Int64s, size: Int64s) -> npt.NDArray[np.bool_]:
    shape: npt.NDArray[np.bool_] = (offset < 0) | (width < 1) | (height < 1) | ((height > 1) & (pitch < width))
    room = size - offset - width  # no product until it is known to be small
    rows: npt.NDArray[np.bool_] = height > room // np.maximum(pitch, 1) + 1
    return shape | (room < 0) | ((height > 1) & rows)


def extremes(copies: CopyBatch) -> tuple[list[int], list[int]]:
    """The least and the most of each column of some copies, as numbers that do not overflow."""
    columns = np.ascontiguousarray(copies.T)  # five times as fast as along the copies
    return np.minimum.reduce(columns, axis=1).tolist(), np.maximum.reduce(columns, axis=1).tolist()


def run_copies(copies: CopyBatch, regions: Mapping[int, memoryview]) -> None:
    """Execute checked copies in order. NumPy lets go of the GIL for all but the smallest."""
    views, copyto, uint8 = np.ndarray, np.copyto, np.uint8
    for src, src_at, dst, dst_at, width, height, src_pitch, dst_pitch in copies.tolist():
        copyto(
            views((height, width), uint8, regions[dst], dst_at, (dst_pitch, 1)),
            views((height, width), uint8, regions[src], src_at, (src_pitch, 1)),
        )


# Check of the way from one device's memory into another one's, before a load uses it.
#
# A driver's word that one GPU reaches another is about models and topology. Behind a translating IOMMU, or without a
# bridge, it says yes, and copies bring wrong bytes or do not end. So each device has a stamp, random bytes in memory
# beside its pool; another device pulls them by the stream of its peer loads, and compares them on the host.
#
# A pull that came late leaves the bytes of its own stamp, so it can make a later check fail, but never pass.

STAMP_BYTES = 2 << 20
"""A whole page of a GPU: each of its small pages and every channel of its memory takes part."""
ROW_BYTES = 64 << 10
SEED_BYTES = 16
TRIES = 3
"""A copy that reports its failure is made again: the check is for those that report none."""
LOOKS, LOOK_SECONDS = 50, 0.1
"""Time limit of a copy: 5 s for 2 MiB. Looks are counted and not the clock, so that a process that was stopped or found
no processor meanwhile accuses no device."""
CHECK_TICKET = -1


class PullHangs(Unavailable):
    """A copy did not end in its time: it may still land, and others on its stream wait behind it."""


class CheckedBackend(Backend, Protocol):
    """A backend with memory for checks."""

    def create_scratch(self, device: str, size_bytes: int) -> Slab:
        """Like ``create_slab``, beside the pool's budget. Freed with the backend."""


class Stamp(NamedTuple):
    """Stamp of a device: where it is, and the seed of its bytes."""

    slab: Slab
    seed: bytes


class PeerCheck:
    """Stamp of one device, and the checks of ways into it. Used by one thread at a time; the backend runs."""

    def __init__(self, backend: CheckedBackend, device: str) -> None:
        self._backend = backend
        self._device = device
        self._stamp: Stamp | None = None
        self._landing: Slab | None = None

    def stamp(self) -> Stamp:
        """The device's stamp, written at the first call. Raises Unavailable, also where it reads back wrong."""
        if self._stamp is None:
            seed = secrets.token_bytes(SEED_BYTES)
            page = memoryview(mmap.mmap(-1, STAMP_BYTES))
            page[:] = bytes_of(seed)
            slab, host = self._backend.create_scratch(self._device, STAMP_BYTES), self._backend.register_host(page)
            self._copy(self._backend.load_stream(self._device), host, slab.region)
            self._compare(slab, seed)
            self._stamp = Stamp(slab, seed)
        return self._stamp

    def verify(self, region: int, seed: bytes) -> None:
        """Pull another device's stamp, which is in ``region`` here. Raises PullHangs, and Unavailable that says what is
        wrong with the way."""
        if self._landing is None:
            self._landing = self._backend.create_scratch(self._device, STAMP_BYTES)
        self._copy(self._backend.peer_stream(self._device), region, self._landing.region)
        self._compare(self._landing, seed)

    def _copy(self, stream: CopyStream, source: int, target: int) -> None:
        row = [source, 0, target, 0, ROW_BYTES, STAMP_BYTES // ROW_BYTES, ROW_BYTES, ROW_BYTES]
        step = CopyStep(np.array([row], np.int64), size_bytes=STAMP_BYTES)
        for left in reversed(range(TRIES)):
            error = _carry_out(stream, step)
            if error is None:
                return
            if isinstance(error, CacheError) or not left:
                raise Unavailable(f"a copy of {STAMP_BYTES} bytes failed: {error}") from error

    def _compare(self, slab: Slab, seed: bytes) -> None:
        try:
            read = self._backend.read(slab.region, 0, STAMP_BYTES)
        except RuntimeError as error:
            raise Unavailable(f"{STAMP_BYTES} bytes could not be read back: {error}") from error
        found = np.frombuffer(read, np.uint8)
        wrong = np.flatnonzero(found != np.frombuffer(bytes_of(seed), np.uint8))
        if len(wrong):
            raise Unavailable(f"{len(wrong)} of {STAMP_BYTES} bytes came wrong, the first at {wrong[0]}")


def refused_of(backend: CheckedBackend, pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Check the ways between devices of one process; return the pairs (source, target) that failed, and why."""
    checks = {device: PeerCheck(backend, device) for device in backend.devices()}
    refused, hung = dict[tuple[str, str], str](), dict[str, str]()
    for source, target in sorted(pairs):
        try:
            if why := hung.get(target):
                raise PullHangs(f"not checked: {why}")
            stamp = checks[source].stamp()
            checks[target].verify(stamp.slab.region, stamp.seed)
        except CacheError as wrong:
            refused[source, target] = str(wrong)
            if isinstance(wrong, PullHangs):
                hung.setdefault(target, str(wrong))
    return refused


def bytes_of(seed: bytes) -> bytes:
    """Bytes of the stamp with this seed, the same in every process."""
    return hashlib.shake_128(seed).digest(STAMP_BYTES)


def _carry_out(stream: CopyStream, step: CopyStep) -> Exception | None:
    """Make a copy, and wait; returns what broke. Raises PullHangs, and what ``submit`` does."""
    over, ends = threading.Event(), list[Exception | None]()

    def done(error: Exception | None) -> None:
        ends.append(error)
        over.set()

    stream.submit(CopyJob(CHECK_TICKET, (step,), None, None, 0, done, size_bytes=STAMP_BYTES))
    if not any(over.wait(LOOK_SECONDS) for _ in range(LOOKS)):
        raise PullHangs(f"a copy of {STAMP_BYTES} bytes did not end in {LOOKS * LOOK_SECONDS:g} s")
    return ends[0]
