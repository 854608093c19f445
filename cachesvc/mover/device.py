"""One device's mover, life after life: its jobs under way, its memory, and a new process when one has died.

With a process go the slabs that it made; the words of its jobs' waiters are set here then, so that no waiter hangs. A
new life begins with an empty device, with the words where they stood, and with the host's chunks.
"""

from __future__ import annotations

import logging
import random
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from cachesvc.memory.interface import Slab, SlabBudget
from cachesvc.memory.timeline import HostTimeline, MappedSheet
from cachesvc.model.errors import CacheError, LedgerBroken, Unavailable
from cachesvc.model.words import CopiesHang, Direction
from cachesvc.mover import records
from cachesvc.mover.life import Life
from cachesvc.mover.records import WAYS, MoverFault, Part, packed, shown
from cachesvc.swap.movers import OnEnd, RankEnd, RankJob
from cachesvc.swap.planner import Pool

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 60.0
"""Between attempts to start a mover again; pauses double. The first attempt comes at once. Each costs a start of Python
and calls of the driver beside GPUs that serve, and where the memory is held by engines it takes until they let go."""
JITTER = 0.5
"""A pause is shorter by up to this part of it, so that not all devices try at the same time."""
STARTING_SECONDS = 5.0
"""Time that a close waits for a mover that is being started; that one is killed once it has come."""
LINGERING_PAUSE_S = 600.0
"""Pause after an attempt whose process could not be killed, seconds: each leaves one behind, with its memory."""


@dataclass(slots=True)
class _State:
    """State of one life, under the lock of the mover. ``fault``: reason why the device does not work now."""

    budget: SlabBudget
    life: Life | None = None
    fault: str = ""
    teller: records.Teller = field(default_factory=records.Teller)
    jobs: dict[int, RankJob] = field(default_factory=dict)
    began: dict[int, float] = field(default_factory=dict)
    lives: int = 0


class DeviceMover:
    """``words``: of a sheet. ``live()`` makes a life that is not started. ``equip(life)``: give a new life what all
    movers have, before it counts. ``on_lost(device, why)``: the slabs of the device are gone; called after its jobs
    have ended."""

    def __init__(
        self,
        device: str,
        capacity_bytes: int,
        words: int,
        live: Callable[[], Life],
        equip: Callable[[Life], None],
        on_lost: Callable[[str, str], None],
        probe_seconds: float,
    ) -> None:
        self._probe_seconds = probe_seconds
        self.device = device
        self.capacity_bytes = capacity_bytes
        self._live = live
        self._equip = equip
        self._on_lost = on_lost
        self.on_end: OnEnd | None = None
        self._now = _State(SlabBudget(device, capacity_bytes), fault="its mover has not started yet")
        self.started: Future[None] = Future()
        self._goes_on, self._is_late = threading.Event(), False
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._is_stopped = False
        self._limits: dict[Direction, int] = {}
        self.timeline = HostTimeline(words)  # of this life, or of the last one
        self._opening = threading.Lock()  # of sheets: each life gets each sheet once
        self._freeing = threading.Lock()  # of slabs: one that is being freed makes room for the next
        self._thread: threading.Thread | None = None

    # -- its life ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to start the first life. ``started`` ends with it, or with the CacheError that says what is missing;
        then ``go_on`` or ``close`` comes."""
        self._thread = threading.Thread(target=self._serve, name=f"ends-{self.device}", daemon=True)
        self._thread.start()

    def go_on(self, *, is_late: bool = False) -> None:
        """Serve with the first life, or without one: the device is broken until one can be started. ``is_late``: the
        start has not waited for it."""
        self._is_late = is_late
        self._goes_on.set()

    @property
    def fault(self) -> str:
        """Reason why the device does not work now; empty while it does."""
        return self._now.fault

    @property
    def pid(self) -> int:
        """Process id of the current or last process."""
        life = self._now.life
        return 0 if life is None else life.pid

    def stop(self) -> None:
        with self._lock:
            if not self._is_stopped and (life := self._now.life) is not None:
                life.put([packed(records.STOP)])
            self._is_stopped = True

    def close(self) -> None:
        """End the process in order, and every job. Idempotent."""
        self._closing.set()
        self._goes_on.set()
        with self._lock:
            self._is_stopped = True
            life = self._now.life
        if life is not None:
            life.put([packed(records.STOP)])  # the mover heeds the first one that it gets
            try:
                life.ask("close")
            except CacheError as gone:
                log.warning("mover_not_closed device=%s reason=%s", self.device, gone)
            life.hang_up()
            life.wait_over()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(None if life is not None else STARTING_SECONDS)
        self.timeline.close()

    def probe(self) -> None:
        """Ask whether the device works; a mover whose device does not, or that is silent, is replaced."""
        life = self._now.life
        if life is None or self._closing.is_set():
            return
        try:
            if fault := life.probe(self._probe_seconds):
                self._broke(life, fault)
        except (CacheError, MoverFault) as gone:
            log.warning("mover_not_probed device=%s reason=%s", self.device, gone)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def submit(self, job: RankJob) -> None:
        """Hand a job over; a job without a live mover ends at once."""
        with self._lock:
            now = self._now
            if now.life is not None and not now.fault and not self._is_stopped:
                now.jobs[job.ticket] = job
                for record in now.teller.job(job):
                    now.life.put(record)
                return
            why = "was closed first" if self._is_stopped else f"does not work ({now.fault})"
        self._end(job, RankEnd(job.ticket, self.device, Unavailable(f"the mover of {self.device} {why}"), None))

    def put(self, record: list[Part]) -> None:
        """Tell the mover of now something, if there is one."""
        life = self._now.life
        if life is not None:
            life.put(record)

    def limit_copies(self, direction: Direction, bytes_per_second: int) -> None:
        """Set another byte budget; later movers get it too."""
        self._limits[direction] = bytes_per_second
        self.put([packed(records.LIMIT, WAYS.index(direction), bytes_per_second)])

    def forget(self, pools: Sequence[Pool]) -> None:
        with self._lock:
            if self._now.life is not None:
                for record in self._now.teller.forget(pools):
                    self._now.life.put(record)

    def began(self, ticket: int) -> float | None:
        """Time at which a job's first slice was started."""
        return self._now.began.get(ticket)

    # -- memory --------------------------------------------------------------------------------------------------------

    def life(self) -> Life:
        """The life of now. Raises Unavailable where there is none."""
        life, fault = self._now.life, self._now.fault
        if life is None or fault or self._closing.is_set():
            raise Unavailable(f"the mover of {self.device} does not work ({fault or 'it is closed'}); try again")
        return life

    def create_slab(self, region: int, size_bytes: int) -> Slab:
        """Zeroed memory under the daemon's number for it. Raises PoolExhausted, Unavailable."""
        life, state = self.life(), self._now
        state.budget.take(size_bytes)
        try:
            with self._freeing:
                told = life.ask("create_slab", region=region, size_bytes=size_bytes)
        except BaseException:
            state.budget.give_back(size_bytes)
            raise

        def give_back(slab: Slab) -> None:
            state.budget.give_back(size_bytes)
            with self._lock:
                is_alive = self._now is state and state.life is not None
            if is_alive:
                try:
                    with self._freeing:
                        life.ask("close_slab", region=slab.region)
                except (Unavailable, MoverFault) as gone:
                    log.info("mover_slab_gone device=%s reason=%s", self.device, gone)

        return Slab(region, *shown(told), give_back)

    def open_sheet(self, number: int) -> None:
        """Words of a model, for this life and those after it. Raises Unavailable, and LedgerBroken where it is open."""
        with self._opening:
            if number in self.timeline.sheets():
                raise LedgerBroken(f"sheet {number} is open already")
            self.timeline.put(number, self.life().open_sheet(number))

    def close_sheet(self, number: int) -> None:
        """The model is forgotten. Nothing where it is not open."""
        with self._opening:
            if number not in self.timeline.sheets():
                return
            self.timeline.close_sheet(number)
            try:
                self.life().ask("close_sheet", sheet=number)
            except (Unavailable, MoverFault) as gone:
                log.info("mover_sheet_gone device=%s reason=%s", self.device, gone)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _begin_life(self, life: Life) -> None:
        renewed = dict[int, MappedSheet]()
        try:
            life.start()
        except (MoverFault, OSError) as broken:
            raise Unavailable(f"the mover of {self.device} broke at its start: {broken}") from broken
        with ExitStack() as undo:
            undo.callback(life.give_back)
            undo.callback(life.wait_over)
            undo.callback(life.hang_up)  # first
            self._equip(life)
            with self._opening:
                for number, before in self.timeline.sheets().items():
                    fresh = life.open_sheet(number, before)
                    undo.callback(fresh.close)
                    renewed[number] = fresh
                for number, fresh in renewed.items():
                    self.timeline.put(number, fresh)
                with self._lock:
                    budget = SlabBudget(self.device, self.capacity_bytes)
                    self._now = _State(budget, life, lives=self._now.lives + 1)
            undo.pop_all()
        for direction, limit in list(self._limits.items()):  # others may come meanwhile
            life.put([packed(records.LIMIT, WAYS.index(direction), limit)])
        if self._closing.is_set():  # a close may have come before there was a life
            life.kill()

    def _serve(self) -> None:
        """Root of the thread that takes ends, and sees to it that there is a mover."""
        try:
            self._begin_life(self._live())
        except Exception as refused:  # noqa: BLE001 - the root of a thread: ``started`` has it
            self._now.fault = str(refused)
            self.started.set_exception(refused)
        else:
            self.started.set_result(None)
        self._goes_on.wait()
        if self._is_late and self._now.life is not None:
            self._tell_start()
        while True:
            if (life := self._now.life) is not None:
                while self._take(life):
                    pass
                self._bury(life)
            if self._closing.is_set() or not self._live_again():
                return

    def _take(self, life: Life) -> bool:
        """Carry out what the mover said; False once it has died."""
        for record in life.take():
            kind = int.from_bytes(record[:8], "little")
            if kind == records.DIED:
                return False
            try:
                self._carry_out(life, kind, record)
            except Exception:
                log.exception("mover_record_broke kind=%d", kind)
        return True

    def _carry_out(self, life: Life, kind: int, record: bytes) -> None:
        if kind == records.ENDED:
            end = records.end_of(record, self.device)
            with self._lock:
                job = self._now.jobs.pop(end.ticket, None)
                self._now.began.pop(end.ticket, None)
            if job is not None:
                self._end(job, end)
        elif kind == records.BEGAN:
            _, ticket, began_ns = struct.unpack("<3q", record)
            with self._lock:
                if ticket in self._now.jobs:
                    self._now.began[ticket] = began_ns / 1e9
        elif kind == records.BROKEN:
            self._broke(life, record[8:].decode(errors="replace"))

    def _end(self, job: RankJob, end: RankEnd) -> None:
        """The mover has set the words of a job that failed, if it could: once more does no harm."""
        if end.error is not None:
            self.timeline.write(job.slot.failed_word, job.slot.end)
            self.timeline.write(job.slot.word, job.slot.end)
        assert self.on_end is not None
        self.on_end(end)

    def _broke(self, life: Life, fault: str) -> None:
        with self._lock:
            if self._now.life is not life or self._now.fault:
                return
            self._now.fault = fault
        log.error("gpu_broken device=%s reason=%s", self.device, fault)
        life.kill()

    def _bury(self, life: Life) -> None:
        """A mover has died: what it had under way ends, and what it held is gone."""
        with self._lock:
            state = self._now
            state.fault = state.fault or "its mover has ended"
            why, state.life = f"{state.fault}; a new one is started", None
            jobs, state.jobs, state.began = list(state.jobs.values()), {}, {}
        kind = CopiesHang if life.lingers else Unavailable
        for job in jobs:
            error = kind(f"the mover of {self.device} died: {why}")
            self._see_to(partial(self._end, job, RankEnd(job.ticket, self.device, error, None)))
        self._see_to(life.give_back)
        if not self._closing.is_set():
            log.error("mover_died device=%s pid=%d reason=%s jobs=%d", self.device, life.pid, state.fault, len(jobs))
            self._see_to(partial(self._on_lost, self.device, why))

    def _see_to(self, deed: Callable[[], object]) -> None:
        """Do one thing after a mover's death; where it breaks the next one is done, and a new mover is started."""
        try:
            deed()
        except Exception:
            log.exception("mover_burial_broke device=%s", self.device)

    def _live_again(self) -> bool:
        """Start a new process, for as long as it takes; False where this is closed first."""
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            life = self._live()
            try:
                self._begin_life(life)
            except Exception as refused:  # the root of a thread: without it the device would never have a mover again
                is_ours = not isinstance(refused, CacheError)
                part = 1 - JITTER * random.random()
                next_s = LINGERING_PAUSE_S if life.lingers else pause_s * part
                log.warning(
                    "mover_not_started device=%s again_s=%.2f reason=%s", self.device, next_s, refused, exc_info=is_ours
                )
                self._closing.wait(next_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                self._tell_start()
                return True
        return False

    def _tell_start(self) -> None:
        log.warning("mover_started device=%s pid=%d lives=%d", self.device, self.pid, self._now.lives)
