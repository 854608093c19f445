"""The movers of all devices as processes: the daemon's memory and its movers in one, without any device's driver here.

Regions have the daemon's numbers. Every mover gets each chunk of the host pool, from a thread
for it alone; a slab goes to its own mover and to
those that reach its device. Whatever a mover must know is kept here, for the one that comes after it.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from cachesvc.memory.host_pool import HostBudget, budget_of
from cachesvc.memory.interface import Slab, require_inside
from cachesvc.memory.timeline import HostTimeline
from cachesvc.model.errors import CacheError, NotFound, Unavailable
from cachesvc.model.words import Direction
from cachesvc.mover.device import DeviceMover
from cachesvc.mover.life import Begin, Claim, HostChunk, Life, child
from cachesvc.mover.peers import PeerSlabs, at_once
from cachesvc.mover.records import EXPEDITE, MOST_DESCRIPTORS, PAUSE, WAYS, MoverFault, Settings, packed
from cachesvc.swap.movers import OnEnd, RankJob
from cachesvc.swap.planner import Pool

log = logging.getLogger(__name__)


PROBE_ANSWER_SECONDS = 10.0
"""A mover answers on a thread that does nothing else: one that takes longer to say how its device is hangs."""
START_SECONDS = 15.0
"""Time for other movers to start once one has, seconds: contexts of all GPUs are made at once, and a GPU that hangs
must not keep the others from serving."""
REFUSED_AGAIN_S = 60.0
"""Time after which a mover is asked again for chunks that it has refused, seconds: pinning costs the driver's time."""
AT_ONCE_AHEAD_S, AT_ONCE_S = 0.75, 0.1
"""Seconds until movers measure what they store at once, in which each touches and pins its memory (0.5 s and more
where there are no huge pages), and for which they do."""


@dataclass(slots=True, eq=False)
class _Equipped:
    """One life of a device's mover: chunks that it has, was asked to take, and refuses, and why."""

    life: Life
    has: set[int] = field(default_factory=set)
    tried: set[int] = field(default_factory=set)
    lacking: dict[int, str] = field(default_factory=dict)
    again_at: float = 0.0


class MoverProcesses:
    """``settings``: one mover's each. ``begins``: how each is started or found; as children unless given.
    ``reaches``: (source, target) devices between which copies go, beside each one and itself; None: all.
    ``probe_seconds``: how long one may take to say how its device is. ``start_seconds``: see ``start``; so
    long may measuring one take, too."""

    def __init__(
        self,
        settings: Sequence[Settings],
        version: str,
        *,
        begins: Sequence[Begin] = (),
        reaches: frozenset[tuple[str, str]] | None = None,
        probe_seconds: float = PROBE_ANSWER_SECONDS,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.name = settings[0].kind
        self._claim: Claim = tuple
        self._lock = threading.Lock()
        self._regions = itertools.count(1)
        self._chunks: dict[int, HostChunk] = {}
        self._equipped: dict[str, _Equipped] = {}
        self._teaching: set[str] = set()  # devices with a thread that tells them of chunks
        self._on_host: Callable[[str], None] = _no_pool
        self._peers = PeerSlabs(reaches)
        self._figures: dict[str, dict[str, Any]] = {}
        self._on_lost: Callable[[str, str], None] = _nobody_told
        self._at = {
            one.device: DeviceMover(
                one.device,
                one.device_bytes,
                one.timeline_words,
                partial(Life, begin, version, replace(one, place=place), self._held),
                partial(self._equip, one.device),
                self._lost,
                probe_seconds,
            )
            for place, (one, begin) in enumerate(
                zip(settings, begins or [partial(child, one.device) for one in settings], strict=True)
            )
        }
        self._asked: set[str] = set()  # devices whose probe is not answered yet
        self._start_seconds = start_seconds
        self._probe_seconds = probe_seconds
        self._running = False
        self._budget: HostBudget | None = None

    def share_claim(self, claim: Claim) -> None:
        """Have movers that start from now on hold the daemon's lock: the next daemon waits for them."""
        self._claim = claim

    def tell_losses(self, on_lost: Callable[[str, str], None]) -> None:
        """Tell ``on_lost(device, why)``, from a thread, when the slabs of a device are gone."""
        self._on_lost = on_lost

    # -- memory --------------------------------------------------------------------------------------------------------

    @property
    def memory(self) -> MoverProcesses:
        return self

    def devices(self) -> tuple[str, ...]:
        return tuple(self._at)

    def capacity_bytes(self, device: str) -> int:
        """Bytes that slabs on ``device`` may take in all."""
        return self._mover(device).capacity_bytes

    def start(self) -> None:
        """Start all movers, at once. Where some start, devices of others are broken until theirs can; one that hangs
        is waited for no longer than ``start_seconds`` behind the first that has started. Raises the CacheError of the
        first where none can, and any that says more than Unavailable."""
        try:
            self._budget = HostBudget.make(len(self._at))
        except OSError as error:
            raise Unavailable(f"no memory file for the node's budget: {error}; see ulimit -n") from error
        for mover in self._at.values():
            mover.begin()
        starts = [mover.started for mover in self._at.values()]
        pending = set(starts)
        while pending and all(not start.done() or start.exception() for start in starts):
            pending = wait(pending, return_when=FIRST_COMPLETED).not_done
        wait(pending, self._start_seconds)
        refused = [failed for start in starts if start.done() and (failed := start.exception()) is not None]
        self._running = True
        asked_wrongly = [failed for failed in refused if not isinstance(failed, Unavailable)]
        if asked_wrongly or len(refused) == len(self._at):
            self.close()
            raise [*asked_wrongly, *refused][0]
        for mover in self._at.values():
            if is_late := not mover.started.done():
                log.warning("mover_start_not_waited_for device=%s", mover.device)
            mover.go_on(is_late=is_late)

    def create_slab(self, device: str, size_bytes: int) -> Slab:
        """Zeroed memory, which the movers that reach it can copy from; one that hangs, only when it has answered.
        Raises PoolExhausted (in bytes), Unavailable."""
        self._check_running()
        at = self._mover(device)
        slab = at.create_slab(next(self._regions), size_bytes)
        close = slab.on_close

        def give_back(closed: Slab) -> None:
            self._peers.remove(device, closed.region)
            at_once([partial(close, closed)])
            if closed.fd is not None:
                os.close(closed.fd)

        slab.on_close = give_back
        self._peers.add(device, slab)
        return slab

    def timeline(self, device: str) -> HostTimeline:
        mover = self._mover(device)
        self._check_running()
        return mover.timeline

    def open_sheet(self, device: str, sheet: int) -> None:
        """Make words of a model, which this process and the mover write. Raises Unavailable."""
        mover = self._mover(device)
        self._check_running()
        mover.open_sheet(sheet)

    def close_sheet(self, device: str, sheet: int) -> None:
        """Forget a model's words: no job of it comes any more."""
        at_once([partial(self._mover(device).close_sheet, sheet)])

    def can_reach(self, source: str, target: str) -> bool:
        """True where the hardware can, and the target's mover has got the source's stamp and knows all of its slabs."""
        self._mover(source)
        self._mover(target)
        return source == target or self._peers.can_reach(source, target)

    def refused_peers(self) -> dict[tuple[str, str], str]:
        """Pairs of devices whose copies failed their check; a new mover of the source is checked anew."""
        return self._peers.refused()

    def register_host(self, buffer: memoryview, fd: int | None = None) -> int:
        """Have every mover map and pin a chunk, which must stay mapped until ``close``. Waits for none: ``has_host``
        says which have it, and ``tell_hosts`` when."""
        self._check_running()
        assert fd is not None, "a mover maps memory files"
        with self._lock:
            region = next(self._regions)
            self._chunks[region] = HostChunk(region, buffer, fd)
            for device in self._equipped:
                self._teach_soon(device)
        return region

    def has_host(self, device: str, region: int) -> bool:
        """True where the mover of a device can copy from and to a chunk."""
        at = self._equipped.get(device)
        return at is not None and region in at.has

    def tell_hosts(self, on_host: Callable[[str], None]) -> None:
        """Tell ``on_host(device)``, from a thread, when a device has got chunks."""
        self._on_host = on_host

    def lacking_hosts(self) -> dict[str, tuple[int, str]]:
        with self._lock:
            lacking = {device: list(at.lacking.values()) for device, at in self._equipped.items() if at.lacking}
        return {device: (len(whys), whys[-1]) for device, whys in lacking.items()}

    def limit_copies(self, direction: Direction, bytes_per_second: int) -> None:
        """Set another byte budget for every device."""
        for mover in self._at.values():
            mover.limit_copies(direction, bytes_per_second)

    def fault(self, device: str) -> str:
        """Reason why a device does not work now; empty while it does."""
        return self._mover(device).fault

    def require_answer(self, device: str) -> None:
        """Ask a device's mover for a sign of life. Raises Unavailable."""
        self._mover(device).life().require_answer(self._probe_seconds)

    def probe(self) -> None:
        """Ask every mover for its device, all at once. Waits for no answer that takes long."""
        at_once([partial(self._probe, device) for device in self._at])

    def read(self, region: int, offset: int, size_bytes: int) -> bytes:
        """Bytes of a region. Raises NotFound for a region that is unknown or gone, InvalidRequest, Unavailable."""
        with self._lock:
            chunk, device = self._chunks.get(region), self._peers.device_of(region)
        if chunk is not None:
            view = chunk.view
            require_inside(offset, size_bytes, view.nbytes)
            return bytes(view[offset : offset + size_bytes])
        if device is None:
            raise NotFound("region", region, "its slab was closed")
        return self._at[device].life().ask("read", region=region, offset=offset, size_bytes=size_bytes).body

    def measure(self) -> dict[str, dict[str, Any]]:
        """Facts and link figures of each device that works, by name, measured on all at once; movers that come later
        plan by them too. One that refuses or hangs is left out: it plans by defaults. Raises what the first refuses
        with where none can be measured."""
        working = [device for device, mover in self._at.items() if not mover.fault]
        self._figures, refused = self._ask_all(working, "measure")
        if refused and not self._figures:
            raise refused[0]
        if len(self._figures) > 1:
            begin = time.monotonic() + AT_ONCE_AHEAD_S
            rates, _ = self._ask_all(list(self._figures), "stores_at_once", begin=begin, measured_s=AT_ONCE_S)
            if all(rates.values()):
                alone = [self._figures[device]["store_bytes_per_us"] * 1e6 for device in rates]
                self.budget.set(budget_of(alone, [head["bytes_per_second"] for head in rates.values()]))
        return self._figures

    def _ask_all(
        self, devices: Sequence[str], name: str, **fields: Any
    ) -> tuple[dict[str, dict[str, Any]], list[Exception]]:
        """Answers of all at once, but for those that refuse or hang, and the errors of these."""
        refused: list[Exception] = []

        def ask(device: str) -> dict[str, Any] | None:
            try:
                return self._at[device].life().ask(name, seconds=self._start_seconds, **fields).head
            except (CacheError, MoverFault) as error:
                log.warning("mover_not_measured device=%s reason=%s", device, error)
                refused.append(error)
                return None

        with ThreadPoolExecutor(len(self._at)) as threads:
            answers = dict(zip(devices, threads.map(ask, devices), strict=True))
        return {device: head for device, head in answers.items() if head is not None}, refused

    @property
    def budget(self) -> HostBudget:
        """Budget of all devices' background copies together. Raises Unavailable."""
        self._check_running()
        assert self._budget is not None
        return self._budget

    def facts(self, device: str) -> dict[str, Any]:
        """Known facts of a device, as its mover reported them. Raises Unavailable."""
        return self._mover(device).life().facts

    def mover_pids(self) -> dict[str, int]:
        return {device: mover.pid for device, mover in self._at.items()}

    def hurry(self) -> None:
        """The daemon stops: wait for no mover that hangs."""
        with self._lock:
            lives = [at.life for at in self._equipped.values()]
        at_once([life.hurry for life in lives])

    def close(self) -> None:
        with ThreadPoolExecutor(len(self._at)) as threads:
            list(threads.map(DeviceMover.close, self._at.values()))
        self._running = False
        with self._lock:
            self._chunks.clear()
            self._equipped.clear()
        for slab in self._peers.close():
            slab.close()
        if self._budget is not None:
            self._budget.close()

    # -- movers --------------------------------------------------------------------------------------------------------

    def listen(self, on_end: OnEnd) -> None:
        """Tell of jobs that end; they are taken from now on."""
        for mover in self._at.values():
            mover.on_end = on_end

    def stop(self) -> None:
        for mover in self._at.values():
            mover.stop()

    def submit(self, job: RankJob) -> None:
        """Hand a job to its device's mover."""
        self._at[job.device].submit(job)

    def expedite(self, devices: Sequence[str], direction: Direction, ticket: int) -> None:
        for device in devices:
            self._mover(device).put([packed(EXPEDITE, WAYS.index(direction), ticket)])

    def began(self, device: str, ticket: int) -> float | None:
        """Time at which a job's first slice was started."""
        return self._at[device].began(ticket)

    def pause_background(self, device: str, seconds: float) -> None:
        """Hold back background stores for a while."""
        self._mover(device).put([packed(PAUSE, round(seconds * 1e6))])

    def forget(self, pools: Sequence[Pool]) -> None:
        for mover in self._at.values():
            mover.forget(pools)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _held(self) -> tuple[int, ...]:
        assert self._budget is not None
        return (self._budget.fd, *self._claim())

    def _equip(self, device: str, life: Life) -> None:
        """Equip a new life: what comes meanwhile reaches it too, and all of it once."""
        with self._lock:
            at = self._equipped[device] = _Equipped(life)
            chunks = list(self._chunks.values())
        if figures := self._figures.get(device):
            life.ask("plan_by", figures=figures)
        refused = life.learn_hosts(chunks)
        if refused and (fault := life.probe(self._probe_seconds)):
            raise Unavailable(f"{device} cannot take host memory: {fault}")
        self._note_chunks(device, at, chunks, refused)
        self._peers.begin(device, life)

    def _teach_soon(self, device: str) -> None:
        """Have a thread of the device's own tell its mover of chunks; under the lock. A mover that takes long keeps its
        own device waiting alone."""
        if device not in self._teaching:
            self._teaching.add(device)
            threading.Thread(target=self._teach, args=(device,), name=f"chunks-{device}", daemon=True).start()

    def _teach(self, device: str) -> None:
        """Root of a thread: until the device has been asked for all chunks that there are."""
        while True:
            with self._lock:
                at = self._equipped.get(device)
                due = [] if at is None else [each for each in self._chunks.values() if each.region not in at.tried]
                if at is None or not due:
                    self._teaching.discard(device)
                    return
            due = due[:MOST_DESCRIPTORS]
            try:
                refused = at.life.learn_hosts(due)
            except (CacheError, MoverFault) as gone:  # its next life gets all of them first
                log.info("mover_chunk_not_told device=%s reason=%s", device, gone)
                with self._lock:
                    self._teaching.discard(device)
                return
            if refused:
                self._at[device].probe()  # of a GPU that broke a new mover asks again
            self._note_chunks(device, at, due, refused)

    def _note_chunks(
        self, device: str, at: _Equipped, chunks: Sequence[HostChunk], refused: dict[int, Exception]
    ) -> None:
        """A life of a mover has taken chunks, or refused some of them, for which it is asked again later."""
        regions = {chunk.region for chunk in chunks}
        with self._lock:
            if self._equipped.get(device) is not at:
                return
            is_first = not at.lacking
            at.tried |= regions
            at.has |= regions - refused.keys()
            at.lacking = {each: why for each, why in at.lacking.items() if each not in regions}
            at.lacking |= {each: str(why) for each, why in refused.items()}
            if refused:
                at.again_at = time.monotonic() + REFUSED_AGAIN_S
        if refused and is_first:
            why = next(iter(refused.values()))
            log.warning("mover_chunk_refused device=%s chunks=%d reason=%s", device, len(refused), why)
        self._on_host(device)

    def _try_refused_again(self, device: str) -> None:
        with self._lock:
            at = self._equipped.get(device)
            if at is not None and at.lacking and time.monotonic() >= at.again_at:
                at.again_at = time.monotonic() + REFUSED_AGAIN_S
                at.tried -= at.lacking.keys()
                self._teach_soon(device)

    def _probe(self, device: str) -> None:
        """Probe a device, unless a probe is in flight."""
        with self._lock:
            if device in self._asked:
                return
            self._asked.add(device)
        try:
            self._at[device].probe()
            self._try_refused_again(device)
        finally:
            self._asked.remove(device)

    def _lost(self, device: str, why: str) -> None:
        with self._lock:
            self._equipped.pop(device, None)
        self._peers.end(device)
        self._on_lost(device, why)

    def _mover(self, device: str) -> DeviceMover:
        if device not in self._at:
            raise NotFound("device", device, f"there are movers for {', '.join(self._at)}")
        return self._at[device]

    def _check_running(self) -> None:
        if not self._running:
            raise Unavailable("the movers are not running: start them first, and nothing works after close")


def _no_pool(device: str) -> None:
    del device  # no pool waits for chunks


def _nobody_told(device: str, why: str) -> None:
    log.error("mover_loss_not_told device=%s reason=%s", device, why)
