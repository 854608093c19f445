"""Faults injected into engines and the daemon, in an order that a seed decides."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.chaos.crew import Crew, EngineSlot

ENGINE_STOP_SHARE = (0.3, 2.5)
"""Stop times as a share of the lease's silence limit: some stops are survived, most cost the lease."""
DAEMON_STOP_SECONDS = (0.2, 2.0)
SLICE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Mean seconds between two faults of a kind; 0: none of it."""

    kill_engine: float = 20.0
    stop_engine: float = 15.0
    kill_daemon: float = 60.0
    stop_daemon: float = 30.0
    cut_calls: float = 10.0
    cut_life: float = 30.0

    def scaled(self, factor: float) -> FaultRates:
        """All intervals longer by a factor."""
        return FaultRates(*(getattr(self, name) * factor for name in self.__dataclass_fields__))


class Faults(threading.Thread):
    """Does one thing at a time to a crew until it stops. ``daemon_dies_until``: seconds after which no daemon is
    killed, so that one life is long enough to judge growth in it."""

    def __init__(self, crew: Crew, rates: FaultRates, seed: int, daemon_dies_until: float) -> None:
        super().__init__(name="faults", daemon=True)
        self.error: Exception | None = None
        self._crew = crew
        self._rng = random.Random(seed)
        self._rates = rates
        self._daemon_dies_until = daemon_dies_until
        self._resume: list[tuple[float, EngineSlot]] = []
        self._kinds: dict[str, Callable[[], bool]] = {
            "kill_engine": lambda: self._signal(signal.SIGKILL),
            "stop_engine": self._stop_engine,
            "kill_daemon": self._kill_daemon,
            "stop_daemon": self._stop_daemon,
            "cut_calls": lambda: self._signal(signal.SIGUSR1),
            "cut_life": lambda: self._signal(signal.SIGUSR2),
        }

    def run(self) -> None:
        """Inject faults until the crew stops, then resume every stopped process."""
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - the root of this thread; the run reports it
            self.error = error
            self._crew.stop()
        finally:
            for _, slot in self._resume:
                slot.tell(signal.SIGCONT)

    def has_done(self, *kinds: str) -> bool:
        """True when each kind was injected at least once; without names, all that are wanted."""
        wanted = kinds or tuple(kind for kind in self._kinds if getattr(self._rates, kind))
        return all(self._crew.figures.faults[kind] for kind in wanted)

    def _serve(self) -> None:
        due = {kind: self._next(kind, 0.0) for kind in self._kinds if getattr(self._rates, kind)}
        began = time.monotonic()
        while not self._crew.stopping.wait(SLICE_SECONDS):
            self._let_go_on()
            now = time.monotonic() - began
            for kind, at in list(due.items()):
                if now >= at:
                    due[kind] = self._next(kind, now)
                    is_spared = kind == "kill_daemon" and now > self._daemon_dies_until and self.has_done(kind)
                    if not is_spared and self._kinds[kind]():
                        self._crew.figures.note_fault(kind)

    def _next(self, kind: str, now: float) -> float:
        return now + self._rng.expovariate(1 / float(getattr(self._rates, kind)))

    def _signal(self, number: signal.Signals) -> bool:
        return self._rng.choice(self._crew.slots).tell(number)

    def _stop_engine(self) -> bool:
        slot = self._rng.choice(self._crew.slots)
        if any(slot is stopped for _, stopped in self._resume) or not slot.tell(signal.SIGSTOP):
            return False
        seconds = self._rng.uniform(*ENGINE_STOP_SHARE) * self._crew.plan.lease_seconds
        self._resume.append((time.monotonic() + seconds, slot))
        return True

    def _let_go_on(self) -> None:
        now = time.monotonic()
        for until, slot in self._resume:
            if now >= until:
                slot.tell(signal.SIGCONT)  # a successor of one that was killed meanwhile does not mind
        self._resume = [(until, slot) for until, slot in self._resume if now < until]

    def _kill_daemon(self) -> bool:
        self._crew.restart_daemon()
        return True

    def _stop_daemon(self) -> bool:
        """Stop the daemon and resume it. Only this thread injects faults, so no restart comes between."""
        process = self._crew.daemon.process
        process.send_signal(signal.SIGSTOP)
        time.sleep(self._rng.uniform(*DAEMON_STOP_SECONDS))  # what is stopped tells nothing to wait for
        process.send_signal(signal.SIGCONT)
        return True
