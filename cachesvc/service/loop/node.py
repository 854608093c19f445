"""The ledger thread: runs flows on the event loop, lands transfers, and lets calls wait for them."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import ParamSpec, TypeVar

from cachesvc.flows.core import NO_MODEL, Chore, Core, Count
from cachesvc.flows.leases import LEASES_A_TURN, empty_lost, lose_device, lose_silent, may_map, process_gone
from cachesvc.flows.pinning import expire_pins
from cachesvc.flows.registration import host_pages_arrived
from cachesvc.flows.transfers import land
from cachesvc.ledger.ledger import Lease
from cachesvc.model.answers import Wait
from cachesvc.model.errors import CacheError, DeadlineExceeded, Unavailable
from cachesvc.model.numbers import BACKGROUND as NO_PARTY
from cachesvc.model.numbers import Party, Rounds
from cachesvc.model.words import DONE, CopiesHang, Failed, Outcome, Run
from cachesvc.questions.view import EVERYTHING, Sight, View, private_pages
from cachesvc.service.access.admission import Admission, CallerKey
from cachesvc.service.access.auth import shown_id
from cachesvc.service.loop.line import (
    BACKGROUND,
    LANDED,
    AsksAgain,
    Line,
    LongCall,
    LoopWatch,
    Sleeper,
    keep_a_moment,
)
from cachesvc.swap.vault import Vault
from cachesvc.telemetry import events

Answer = TypeVar("Answer")
P = ParamSpec("P")
LANDINGS = 8
"""Transfers that land in a turn: each costs as much as some blocks, however few it has."""
NEEDS = "the transfers that this call needs"
TOO_LATE = "the turn of this call came after its deadline, and nothing was changed; send fewer calls at a time"


def end_wait(wait: Wait) -> None:
    """End a wait: what was kept for the call can be taken. Idempotent."""
    if wait.reserved is not None:
        wait.reserved.release()


class Node:
    """Owns the Core on one event loop. Everything but ``on_transfer_done`` and ``on_host_pages`` is called there.

    ``on_change`` is called after every flow: blocks may have come or gone. So is ``on_work``, which may add chores.
    Both must be quick. ``on_sweep`` is called now and then, with the time: for what has to be done sometime.
    """

    def __init__(self, core: Core, *, epoch: int, wait_seconds: float, lease_seconds: float) -> None:
        self.core = core
        self.epoch = epoch
        self.lease_seconds = lease_seconds
        self.now: Callable[[], float] = time.monotonic
        """Clock of the flows, monotonic seconds."""
        self.started = self.now()
        self.on_change: Callable[[], None] | None = None
        self.on_work: Callable[[], None] | None = None
        self.on_sweep: Callable[[float], None] | None = None
        self.wait_seconds = wait_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: dict[int, list[Sleeper]] = {}
        self._landings: Rounds[Party, tuple[int, Outcome]] = Rounds()
        self._sweeping: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._vault: Vault | None = None
        self.loop_watch = LoopWatch()
        self._line = Line(lambda: self.now())  # noqa: PLW0108 - a test may set another
        self.next_turn = self._line.next_turn
        self._is_tidying = False
        core.on_refused = _log_failure
        core.on_ended = self._wake
        core.on_left = tell_left

    @property
    def vault(self) -> Vault:
        """The memory; set by the composition root before the first call."""
        assert self._vault is not None
        return self._vault

    def start(self, vault: Vault) -> None:
        self._vault = vault
        self._loop = asyncio.get_running_loop()
        self.loop_watch.start(self._loop)
        self._sweeping = self._loop.create_task(self._sweep())

    def stop_waiting(self) -> None:
        """The daemon stops: calls that wait for transfers end now, and none waits from here on."""
        self._is_stopping = True
        for waiting in self._waiters.values():
            for sleeper in waiting:
                sleeper.wake()

    async def close(self) -> None:
        self.stop_waiting()
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)

    def view(self, sight: Sight = EVERYTHING) -> View:
        return View(self.core, sight, self.now)

    # -- from other threads ------------------------------------------------------------------------------------

    def on_transfer_done(self, ticket: int, error: Exception | None) -> None:
        """A transfer has ended; called by the swap engine's threads."""
        hangs = isinstance(error, CopiesHang)
        outcome = DONE if error is None else Failed(str(error) or type(error).__name__, may_write=hangs)
        self.soon(self._landed, ticket, outcome)

    def on_host_pages(self, model: int, group: int, run: Run) -> None:
        """Use more host pages; called by the host pool's threads."""
        self.soon(host_pages_arrived, self.core, model, group, run)

    def on_device_lost(self, device: str, why: str) -> None:
        """The slabs of a device are gone with its mover; called by a thread, once the device's transfers have ended."""
        self.soon(self._line.add, BACKGROUND, partial(self._lose_device, device, why))

    def soon(self, call: Callable[..., object], *arguments: object) -> None:
        """Have something called on the loop; from any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(call, *arguments)

    # -- on the loop -------------------------------------------------------------------------------------------

    def run(self, flow: Callable[P, Answer], *args: P.args, **kwargs: P.kwargs) -> Answer:
        return self.run_of(0, flow, *args, **kwargs)

    def run_of(self, model: int, flow: Callable[P, Answer], *args: P.args, **kwargs: P.kwargs) -> Answer:
        """Run a flow of one model (0: of none) once. One that breaks takes the model out of service: what it left
        half-done is not served. Raises what it raises."""
        self.core.ledger.moment.seconds = self.now()
        try:
            return flow(*args, **kwargs)
        except CacheError:
            raise
        except Exception as broken:
            if model:
                self.distrust(model, f"{type(broken).__name__}: {broken}")
            raise
        finally:
            self._changed()

    def distrust(self, model: int, why: str) -> None:
        """Serve no calls of a model any more, until it is verified: a defect may have left its accounting wrong."""
        known = self.core.ledger.models.get(model)
        if known is not None:
            known.distrust(why)
        self.core.count(Count.MODELS_DISTRUSTED)
        events.warning("model_distrusted", model=model, reason=why)

    def trust(self, model: int) -> None:
        """A model was verified and found sound: serve it again."""
        if self.core.ledger.model(model).suspect:
            self.core.ledger.model(model).suspect = ""
            events.event("model_trusted", model=model)

    async def wait_out(
        self,
        run: Callable[[], Answer | Wait],
        wait: Wait,
        until: float,
        party: CallerKey,
        what: str = "call",
        on_wait: Callable[[], None] | None = None,
    ) -> Answer:
        """Run again whenever tickets that it waits for have ended, or its patience has, until it answers. What can do
        without its transfers is run once more when the time is up.

        ``run`` has just answered ``wait``. ``until``: monotonic seconds. ``party``: whose turns it takes. ``what``: for
        the loop watch. ``on_wait`` is called before it waits for tickets, and may raise.
        A long call waits for the long ones of its party before it; none is run after its deadline, unless it goes on.
        Raises DeadlineExceeded, LimitExceeded, Unavailable, and what ``on_wait`` raises.
        """
        reserved = wait.reserved
        long: LongCall | None = None
        try:
            while True:
                reserved = wait.reserved or reserved
                if wait.tickets and on_wait is not None:
                    on_wait()
                left = until - self.now()
                patience = max(0.0, left if wait.seconds is None else min(left, wait.seconds))
                if wait.turns and long is None:
                    long = LongCall(self._line, party, wait.turns, until)
                elif wait.tickets and long is not None:
                    long.end()
                    long = None
                if long is not None:
                    await long.turn()
                elif not await self.wait_any(wait.tickets, patience, party):
                    if wait.seconds is None:
                        raise DeadlineExceeded(f"{NEEDS} did not end in time; try again or recompute")
                    await self.next_turn(party)
                if not (wait.tickets or wait.goes_on) and self.now() >= until:
                    raise DeadlineExceeded(TOO_LATE, was_answered=True)
                with self.loop_watch.watching(what):
                    answer = run()
                if not isinstance(answer, Wait):
                    return answer
                reserved = answer.reserved or reserved
                if left <= 0 and not answer.goes_on:  # tickets may end forever without bringing what the flow needs
                    raise DeadlineExceeded(f"{NEEDS} did not help in time; try again or recompute")
                wait = answer
        except AsksAgain:
            keep_a_moment(reserved, self.now())
            reserved = None
            raise
        finally:
            if long is not None:
                long.end()
            if reserved is not None:
                reserved.release()

    @property
    def has_turns(self) -> bool:
        """True while a long flow has more to do."""
        return not self._line.is_empty

    def running(self, tickets: Iterable[int]) -> list[int]:
        return [ticket for ticket in tickets if self.core.ledger.tickets.is_running(ticket)]

    def knows(self, token: bytes) -> bool:
        """True for the life-socket token of a process that is there."""
        return token in self.core.ledger.processes

    def party_of(self, token: bytes) -> Party:
        """Party that a life-socket token counts to: one process may have several life connections."""
        known = self.core.ledger.processes.get(token)
        return token if known is None else known.party

    def process_gone(self, token: bytes) -> None:
        """Handle the end of a process, as the kernel reports it: a turn of its own, whatever it has under way."""
        self._line.take(self.party_of(token), partial(self.run, partial(process_gone, self.core, token)))

    def descriptor(self, process: bytes, token: bytes) -> int | None:
        """Descriptor behind a handle's token, for a process that has attached it."""
        shared = self.vault.shared(token)
        return shared.fd if shared is not None and may_map(self.core, process, *shared[1:]) else None

    async def wait_any(self, tickets: Iterable[int], seconds: float, party: CallerKey) -> bool:
        """True when one of the tickets has ended and it is the party's turn; False when the time is up first.

        Raises Unavailable when the daemon stops.
        """
        running = set(self.running(tickets))
        self._require_going_on()
        if not running:
            await self.next_turn(party)
            return True
        sleeper = Sleeper(self._line, party)
        for ticket in running:
            self._waiters.setdefault(ticket, []).append(sleeper)
        try:
            await asyncio.wait_for(sleeper.future, max(seconds, 0))
        except TimeoutError:
            return False
        finally:
            for ticket in running:
                waiting = self._waiters.get(ticket)
                if waiting is not None and sleeper in waiting:
                    waiting.remove(sleeper)
                    if not waiting:
                        del self._waiters[ticket]
        self._require_going_on()
        return True

    def _require_going_on(self) -> None:
        if self._is_stopping:
            raise Unavailable("the daemon stops; go on without the cache")

    def _landed(self, ticket: int, outcome: Outcome) -> None:
        is_first, known = not self._landings, self.core.ledger.tickets.running.get(ticket)
        self._landings.add(NO_PARTY if known is None else known.party, (ticket, outcome))
        if is_first:
            self._line.take(LANDED, self._land_some)

    def _land_some(self) -> None:
        """Land a turn's worth of transfers, round robin by the process that they are for."""
        running, a_turn = self.core.ledger.tickets.running, self.core.turns.landed
        left = float(LANDINGS)
        while self._landings and left > 0:
            ticket, outcome = self._landings.take()
            known = running.get(ticket)
            blocks = 0 if known is None else known.blocks
            left -= max(1.0, LANDINGS * blocks / a_turn)
            self._land(ticket, outcome)
        if self._landings:
            self._line.add(LANDED, self._land_some)

    def _land(self, ticket: int, outcome: Outcome) -> None:
        """A ticket has ended. Raises nothing: it runs as a callback, or behind a flow whose answer counts."""
        began = self.loop_watch.begin()
        self.core.ledger.moment.seconds = self.now()
        if isinstance(outcome, Failed):
            _log_failure(ticket, outcome.reason)
        landing = self.core.ledger.tickets.running.get(ticket)
        try:
            ended: Iterable[int] = land(self.core, ticket, outcome)
        except Exception as broken:  # noqa: BLE001 - the root of a callback: calls that wait must be woken
            events.failure("landing_broke", ticket=ticket)
            if landing is not None:
                self.distrust(landing.model, f"{type(broken).__name__}: {broken}")
            ended = (ticket,)
        self._wake(ended)
        self._changed()
        self.loop_watch.note("landing", began)

    def run_news(self, model: int, flow: Callable[[], None]) -> None:
        """Run a flow that no call waits for: the root of a callback. A flow that breaks takes its model out of
        service."""
        began = self.loop_watch.begin()
        try:
            self.run_of(model, flow)
        except Exception:  # noqa: BLE001 - the root of a callback: other news is still to be told
            events.failure("storage_news_broke", model=model)
        self.loop_watch.note("storage", began)

    def _lose_device(self, device: str, why: str) -> None:
        """Lose it behind its transfers, which have ended. Raises nothing: the root of a callback."""
        if self._landings:
            self._line.add(BACKGROUND, partial(self._lose_device, device, why))
            return
        try:
            self.vault.lose(device)
            lost = self.run(lose_device, self.core, device, why)
        except Exception:  # noqa: BLE001 - the root of a callback
            events.failure("device_loss_broke", device=device)
            return
        events.warning("device_memory_lost", device=device, reason=why, leases=len(lost))

    def _wake(self, ended: Iterable[int]) -> None:
        """Tickets have ended: each call that waits for one of them takes its turn."""
        for each in ended:
            for sleeper in self._waiters.pop(each, ()):
                sleeper.rouse()

    def _changed(self) -> None:
        """Follow up on a flow, or a part of one, that has run."""
        if self.on_change is not None:
            self.on_change()
        if self.on_work is not None:
            self.on_work()
        if self.core.chores and not self._is_tidying and self._loop is not None:
            self._is_tidying = True
            self._line.add(BACKGROUND, self._tidy)

    def _tidy(self) -> None:
        """Do a turn of what is left to do. The root of a callback: raises nothing."""
        began = self.loop_watch.begin()
        self.core.ledger.moment.seconds = self.now()
        self._is_tidying = False
        chore = self.core.chores.take()
        model = chore.model
        try:
            if not chore.go_on():
                self.core.chores.add(chore.party, chore)
        except CacheError as refusal:  # as a call is refused: it has changed nothing by halves
            self.core.count(Count.CHORES_REFUSED)
            events.warning("chore_refused", model=model, reason=str(refusal))
        except Exception as broken:  # noqa: BLE001 - the root of a callback: other chores are still to be done
            events.failure("chore_broke", model=model)
            self.distrust(model, f"{type(broken).__name__}: {broken}")
        self._changed()
        self.loop_watch.note("chore", began)

    # -- periodic work: silent leases, empty lost places, pins that end, the collector -----------------------------

    async def _sweep(self) -> None:
        rest = pause = min(1.0, self.lease_seconds / 4)
        while True:
            asleep = self.now()
            await asyncio.sleep(rest)
            try:
                self.excuse(self.now() - asleep - rest, pause)
                self.core.ledger.mark_time(self.now())
                with self.loop_watch.watching("sweep"):
                    self.run(empty_lost, self.core)
                    self._expire_pins()
                rest = 0.0 if self._lose_some() else pause
                if self.on_sweep is not None:
                    with self.loop_watch.watching("collector"):
                        self.on_sweep(self.now())
            except Exception:  # noqa: BLE001 - the root of a task: without it no lease would be lost again
                events.failure("sweep_broke")

    def _expire_pins(self) -> None:
        for model, pin in self.run(expire_pins, self.core, self.now()):
            events.event("pin_expired", model=model.id, key=pin.key.hex()[:SHOWN_DIGITS], blocks=pin.blocks)

    def _lose_some(self) -> bool:
        """Lose leases that are silent, a turn's worth; True where there may be more."""
        with self.loop_watch.watching("sweep"):
            lost = self.run(lose_silent, self.core, self.lease_seconds, self.now())
            for lease in lost:
                events.warning("lease_silent", lease=shown_id(lease), seconds=self.lease_seconds)
        return len(lost) == LEASES_A_TURN

    def excuse(self, late: float, pause: float) -> None:
        """Count the time of a long hold of the loop as no silence of any lease: heartbeats of that time are yet to be
        read."""
        if late > pause:
            now = self.now()
            for lease in self.core.ledger.leases.values():
                lease.heard(min(now, lease.last_heard + late))


def _log_failure(ticket: int, reason: str) -> None:
    events.warning("transfer_failed", ticket=ticket, reason=reason)


SHOWN_DIGITS = 16
"""Hexadecimal digits of a key in the log."""


def tell_left(lease: Lease) -> None:
    """Log what a process held of a lease at its end, and the pages that come back once no process can write them."""
    held = {"sequences": len(lease.sequences), "private_pages": private_pages(lease)}
    events.event("lease_process_ended", lease=shown_id(lease.id), engine=lease.engine, **held)


# Python's cyclic collector, run between calls instead of within them.
#
# Left to itself it runs after a number of new objects, which is in the middle of a call, and a full pass over the
# bookkeeping of a million blocks takes 20 ms. So it is off. What is new is passed over in a turn of its own whenever
# there is some of it, which keeps each pass short, and the sweep has it run where hardly anything was done lately:
# between two calls of an engine at work there is no room for a full pass. What the ledger keeps for long is taken out
# of its sight now and then (``gc.freeze``): a full pass then costs by what is new.

FULL_EVERY_SECONDS = 300.0
LATE_SECONDS = 30.0
"""A daemon that is never idle collects all the same, after so long: garbage in cycles would grow without bound."""
FULL_SHARE = 1e-4
"""Most of its time that full passes may take, as a share."""
QUIET_FLOWS = 20
"""Flows between two sweeps, a second, up to which the daemon is idle: signs of life, and the sweep itself."""
FREEZE_ROWS = 5_000
YOUNG_OBJECTS = 2_000
"""Number of new objects that a pass of some 0.2 ms looks at."""
PASS_SECONDS = 0.2e-3
MOST_FLOWS = 256
"""Most flows between two passes over new objects. The collector's own count is too low: it subtracts old objects that
go, and a full cache replaces old by new."""


class Collector:
    """``rest`` is called now and then, ``glance`` after whatever was done. ``is_idle``: nothing is being served;
    ``rows``: of all models' blocks."""

    def __init__(
        self, is_idle: Callable[[], bool], rows: Callable[[], int], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._is_idle = is_idle
        self._rows = rows
        self._frozen_rows = 0
        self._flows = 0
        self._flows_since_pass = 0
        self._flows_a_pass = MOST_FLOWS
        self._last = 0.0
        self._last_full: float | None = None
        self._full_took = 0.0
        self._is_lined_up = False

    def start(self) -> None:
        """Off from now on; modules and stubs live as long as the process, and are never walked again."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def close(self) -> None:
        gc.enable()
        gc.unfreeze()

    def glance(self, chores: Rounds[Party, Chore]) -> None:
        """Something was done: where enough is new it is passed over in the next turn. Behind thousands of chores there
        would be ten times as much by then."""
        self._flows += 1
        self._flows_since_pass += 1
        is_much = self._flows_since_pass >= self._flows_a_pass or gc.get_count()[0] > YOUNG_OBJECTS
        if is_much and not self._is_lined_up:
            self._is_lined_up = True
            chores.add_first(NO_PARTY, Chore(NO_MODEL, self._pass_over_new))

    def _pass_over_new(self) -> bool:
        self._is_lined_up = False
        self._flows_since_pass = 0
        took = self._pass_over(1)
        if took > PASS_SECONDS:
            self._flows_a_pass = max(1, self._flows_a_pass // 2)
        elif took < PASS_SECONDS / 4:
            self._flows_a_pass = min(MOST_FLOWS, 2 * self._flows_a_pass)
        return True

    def _pass_over(self, generation: int) -> float:
        began = self._clock()
        gc.collect(generation)
        return self._clock() - began

    def rest(self, now: float) -> None:
        """Collect, where this is a good moment or the last one was too long ago. ``now``: seconds, monotonic."""
        is_quiet = self._is_idle() and self._flows <= QUIET_FLOWS
        self._flows = 0
        if not is_quiet and now - self._last < LATE_SECONDS:
            return
        if self._last_full is None:
            self._last_full = now
        rows = self._rows()
        has_grown = rows - self._frozen_rows >= FREEZE_ROWS
        full_every = FULL_EVERY_SECONDS if is_quiet else self._full_took / FULL_SHARE
        if not has_grown and now - self._last_full >= full_every:
            self._full_took = self._pass_over(2)
            self._last_full = now
        else:
            self._pass_over(1)
        if has_grown:  # before a full pass, which would walk all that is new: young garbage alone is gone
            gc.freeze()
        if has_grown or rows < self._frozen_rows:
            self._frozen_rows = rows
        self._last = now


def collector_between_calls(node: Node, admission: Admission) -> Collector:
    """Make a collector that the node's sweep runs while no call is being served and no flow has turns left."""
    models = node.core.ledger.models
    collector = Collector(
        lambda: not (admission.work.held or node.has_turns),
        lambda: sum(len(model.blocks.index.keys) for model in models.values()),
    )
    node.on_sweep = collector.rest
    node.on_work = partial(collector.glance, node.core.chores)
    return collector
