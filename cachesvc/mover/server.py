"""A mover at work: memory, words and copies of one device, for the daemon at the other end of a connection.

Jobs come by a ring and are read by one thread, which hands them to ``InProcessMovers``, the planner and streams of a
daemon without movers, and starts a job's first slice itself where the device is idle; ends go back by another ring.
Everything else is asked on the connection, and answered by the thread that serves it. With the end of the connection
all is over, in order: nothing here outlives its daemon. Clients learn in milliseconds that their daemon is gone, and
may recompute into the very pages of a load. So whatever is not on its way by then ends at once, also while a question
is being answered: what is left to be waited for is one slice, or a few, of each stream.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from cachesvc.memory.backend import LocalBackend, PeerCheck, PullHangs
from cachesvc.memory.extents import map_memfd
from cachesvc.memory.host_pool import HostBudget, Neighbours
from cachesvc.memory.interface import Slab
from cachesvc.model.errors import CacheError, NotFound, Unavailable
from cachesvc.model.words import CopiesHang
from cachesvc.mover import records
from cachesvc.mover.records import (
    ENDS_BYTES,
    JOBS_BYTES,
    MOST_DESCRIPTORS,
    MOST_REASON_BYTES,
    WAYS,
    Int64s,
    Message,
    Reader,
    Ring,
    Settings,
    Writer,
    answer_all,
    packed,
    showing,
    shown,
    told_as,
)
from cachesvc.swap.movers import InProcessMovers, RankEnd
from cachesvc.swap.planner import LinkCosts, costs_of

log = logging.getLogger(__name__)

READER_SECONDS = 2.0
"""Time for which the end waits for the thread that reads jobs, seconds. Longer, it stands in a call of the driver: the
backend waits for that at its end, or finds that it hangs."""

LANDING_SECONDS, LOOK_SECONDS = 2.0, 0.001
"""Time for which the end waits for copies in flight before it frees memory, and the polling interval, seconds."""


class Equipment(NamedTuple):
    """Equipment of a mover. ``facts``: known facts of its device, by the names of DeviceStatus. ``measure``: its link's
    figures by name, and the costs of plans on it; None: nothing can be measured. ``costs``: until then.
    ``stores_at_once(begin, seconds)``: bytes a second that it stores meanwhile, as others do."""

    backend: LocalBackend[Any]
    facts: Callable[[], dict[str, Any]]
    measure: Callable[[], tuple[dict[str, Any], LinkCosts]] | None = None
    costs: LinkCosts | None = None
    stores_at_once: Callable[[float, float], float] | None = None


class MoverServer:
    """Serves one daemon. ``equip`` makes what is asked for, not started yet; it raises a CacheError."""

    def __init__(
        self, connection: socket.socket, version: str, equip: Callable[[Settings, Neighbours], Equipment]
    ) -> None:
        self._connection = connection
        self._version = version
        self._equip = equip
        self._work: _Work | None = None
        self._claim = -1

    def serve(self) -> None:
        """Until the daemon hangs up; then give everything back."""
        # A place for the daemon's lock: the kernel lets go of a killed process's descriptors from the highest number to
        # the lowest, and the lock has to be the last (Linux 6.18; beside 1.6 GiB of memory files 2.4 s later).
        self._claim = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        looking = threading.Thread(target=self._look_for_end, name="daemon-gone", daemon=True)
        looking.start()
        try:
            answer_all(self._connection, self._answer)
        finally:
            if self._work is not None:
                self._work.close()
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            looking.join()
            self._connection.close()
            os.close(self._claim)

    def _look_for_end(self) -> None:
        """Root of a thread: start no more copies once the daemon has hung up, whatever it still has asked for."""
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLRDHUP)
        poll.poll()
        if (work := self._work) is not None:
            work.stop()

    def _answer(self, asked: Message) -> Message:
        name = asked.head["ask"]
        if name == "hello":
            return Message({"version": self._version, "pid": os.getpid()})
        if name == "open":
            settings = Settings(**{field: told for field, told in asked.head.items() if field != "ask"})
            logging.getLogger().setLevel(settings.log_level.upper())
            jobs, ends, budget, *claim = asked.descriptors
            for descriptor in claim:
                os.dup2(descriptor, self._claim, inheritable=False)
            page = HostBudget(os.dup(budget))
            page.close()  # the mapping stays
            self._work = _Work(settings.device, self._equip(settings, page.of(settings.place)), jobs, ends)
            return self._work.start()
        if self._work is None:
            raise Unavailable("this mover was not opened")
        return self._work.answer(asked)


class _Work:
    """State of one device, between ``start`` and ``close``."""

    def __init__(self, device: str, equipment: Equipment, jobs: int, ends: int) -> None:
        """The descriptors are the connection's; copies of them are kept."""
        self._device = device
        self._equipment = equipment
        self._backend = equipment.backend
        self._rings = Ring(os.dup(jobs), JOBS_BYTES), Ring(os.dup(ends), ENDS_BYTES)
        self._jobs, self._ends = Reader(self._rings[0]), Writer(self._rings[1])
        self._inside = InProcessMovers(self._backend, costs=equipment.costs, on_begin=self._begun)
        self._regions: dict[int, int] = {}
        self._slabs: dict[int, Slab] = {}
        self._writers: dict[int, int] = {}  # of sheets, for as long as copies may land
        self._check = PeerCheck(self._backend, device)
        self._is_pinning = False
        self._listener = records.Listener(device, self._regions)
        self._thread = threading.Thread(target=self._serve_jobs, name="jobs", daemon=True)
        self._takes: dict[int, Callable[[Int64s], object]] = {
            records.GEOMETRY: self._listener.geometry,
            records.TABLE: self._listener.table,
            records.FORGET: self._listener.forget,
            records.EXPEDITE: lambda told: self._inside.expedite((device,), WAYS[told[1]], int(told[2])),
            records.PAUSE: lambda told: self._inside.pause_background(device, told[1] / 1e6),
            records.LIMIT: lambda told: self._backend.limit_copies(WAYS[told[1]], int(told[2])),
        }

    def start(self) -> Message:
        """Take the device and begin to take jobs; returns the device's facts."""
        self._backend.start()
        self._inside.listen(self._ended)
        self._thread.start()
        return Message(self._equipment.facts())

    def answer(self, asked: Message) -> Message:
        """Answer a question by the method of its name. Raises what stands against it."""
        answer: Callable[[Message], Message] = getattr(self, f"_answer_{asked.head['ask']}")
        return answer(asked)

    def close(self) -> None:
        """The daemon is gone: see what is on its way land, fail the rest, give everything back. Idempotent."""
        self._jobs.stop()
        self._finish()
        self._ends.close()
        for ring in self._rings:
            ring.close()

    def stop(self) -> None:
        """Start no more copies. Does not wait."""
        self._inside.stop()

    def _finish(self) -> None:
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(READER_SECONDS)
        until = time.monotonic() + LANDING_SECONDS
        while self._inside.is_busy and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        if not self._inside.is_busy:
            self._let_go()  # first: to unpin memory takes its time
        self._backend.close()
        self._let_go()

    def _let_go(self) -> None:
        """Close the writers' ends, since all copies have landed: engines learn it from that. Where the device broke,
        copies may land while this process lives."""
        while self._writers and not self._backend.fault(self._device):
            os.close(self._writers.popitem()[1])

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def _serve_jobs(self) -> None:
        """Root of the thread that reads jobs."""
        while self._jobs.wait():
            for record in self._jobs.take():
                kind = int.from_bytes(record[:8], "little")
                if kind == records.STOP:
                    self._inside.stop()
                    return
                try:
                    self._carry_out(kind, record)
                except Exception as broken:
                    log.exception("mover_record_broke kind=%d", kind)
                    if kind == records.JOB:  # no other code would end it; its words are the daemon's to set
                        ticket = int.from_bytes(record[8:16], "little")
                        self._ended(RankEnd(ticket, self._device, broken, None))

    def _carry_out(self, kind: int, record: bytes) -> None:
        if kind == records.JOB:
            self._inside.submit_here(self._listener.job(record))
        else:
            self._takes[kind](np.frombuffer(record, np.int64))

    def _begun(self, ticket: int, now: float) -> None:
        self._ends.put(
            [packed(records.BEGAN, ticket, round(now * 1e9))], wakes=False
        )  # a thread that wakes there halts the loop

    def _ended(self, end: RankEnd) -> None:
        if not isinstance(end.error, CopiesHang):  # that one the daemon ends, once this process cannot write any more
            self._ends.put(records.end_record(end))
        if end.error is not None and (fault := self._backend.fault(self._device)):
            self._ends.put([packed(records.BROKEN), fault.encode()[:MOST_REASON_BYTES]])

    # -- questions -----------------------------------------------------------------------------------------------------

    def _answer_open_sheet(self, asked: Message) -> Message:
        words, writers = asked.descriptors
        self._backend.open_sheet(self._device, asked.head["sheet"], words)
        self._writers[asked.head["sheet"]] = os.dup(writers)
        return Message({})

    def _answer_close_sheet(self, asked: Message) -> Message:
        self._backend.close_sheet(self._device, asked.head["sheet"])
        os.close(self._writers.pop(asked.head["sheet"]))
        return Message({})

    def _answer_create_slab(self, asked: Message) -> Message:
        region, size_bytes = asked.head["region"], asked.head["size_bytes"]
        slab = self._slabs[region] = self._backend.create_slab(self._device, size_bytes)
        self._regions[region] = slab.region
        return showing(slab.handle, slab.fd)

    def _answer_close_slab(self, asked: Message) -> Message:
        region = asked.head["region"]
        self._slabs.pop(region).close()
        del self._regions[region]
        return Message({})

    def _answer_register_hosts(self, asked: Message) -> Message:
        """Register memory at the mover and the GPU side by side, for the driver pins by one thread more slowly than
        several fill memory; reports the refusal of each, if any."""
        self._is_pinning = True
        try:
            with ThreadPoolExecutor(MOST_DESCRIPTORS) as pins:
                chunks, files = asked.head["chunks"], asked.descriptors
                return Message({"refused_of": list(pins.map(self._register_host, chunks, files))})
        finally:
            self._is_pinning = False

    def _register_host(self, chunk: tuple[int, int], fd: int) -> tuple[str, str] | None:
        region, size_bytes = chunk
        try:
            self._regions[region] = self._backend.register_host(map_memfd(fd, size_bytes))
        except (CacheError, OSError) as refused:
            return told_as(refused)
        return None

    def _answer_open_peer(self, asked: Message) -> Message:
        self._regions[asked.head["region"]] = self._backend.open_peer(*shown(asked))
        return Message({})

    def _answer_close_peer(self, asked: Message) -> Message:
        self._backend.close_peer(self._regions.pop(asked.head["region"]))
        return Message({})

    def _answer_stamp(self, asked: Message) -> Message:
        del asked
        slab, seed = self._check.stamp()
        return showing(slab.handle, slab.fd, seed=seed.hex())

    def _answer_check_peer(self, asked: Message) -> Message:
        """Pull another mover's stamp, by the way of loads from it."""
        region = self._backend.open_peer(*shown(asked))
        why = ""
        try:
            self._check.verify(region, bytes.fromhex(asked.head["seed"]))
        except PullHangs as hangs:  # the stamp stays mapped: the copy may go on reading it
            return Message({"wrong": str(hangs), "hangs": True})
        except Unavailable as wrong:
            why = str(wrong)
        self._backend.close_peer(region)
        return Message({"wrong": why, "hangs": False})

    def _answer_read(self, asked: Message) -> Message:
        region = self._regions.get(asked.head["region"])
        if region is None:
            raise NotFound("region", asked.head["region"], "its slab was closed")
        return Message({}, self._backend.read(region, asked.head["offset"], asked.head["size_bytes"]))

    def _answer_measure(self, asked: Message) -> Message:
        del asked
        if self._equipment.measure is None:
            return Message({})
        figures, costs = self._equipment.measure()
        self._inside.plan_by(costs)
        return Message(figures)

    def _answer_stores_at_once(self, asked: Message) -> Message:
        measure = self._equipment.stores_at_once
        if measure is None:
            return Message({})
        return Message({"bytes_per_second": measure(asked.head["begin"], asked.head["measured_s"])})

    def _answer_plan_by(self, asked: Message) -> Message:
        """Plan by another mover's measurements of this device."""
        self._inside.plan_by(costs_of(asked.head["figures"]))
        return Message({})

    def _answer_watch(self, asked: Message) -> Message:
        """Answer signs of life on a connection of their own from now on, also while other questions take their time."""
        connection = socket.socket(fileno=os.dup(asked.descriptors[0]))
        threading.Thread(target=self._show_signs, args=(connection,), name="signs", daemon=True).start()
        return Message({})

    def _show_signs(self, connection: socket.socket) -> None:
        """Root of a thread: until the daemon hangs up."""
        with connection:
            answer_all(connection, self._sign)

    def _sign(self, asked: Message) -> Message:
        """A sign of life, and for a probe what is wrong with the device. While the driver pins memory it may hold all
        its other calls for seconds, which is no sign of a GPU that hangs: then it is not asked."""
        if asked.head["ask"] == "probe" and not self._is_pinning:
            self._backend.probe()
        return Message({"fault": self._backend.fault(self._device)})

    def _answer_close(self, asked: Message) -> Message:
        """Stop: the daemon has sent this mover a stop by the ring."""
        del asked
        self._finish()
        return Message({})
