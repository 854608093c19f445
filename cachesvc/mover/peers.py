"""Device memory that movers hold, and the other movers that may copy from it.

A mover copies from another one's slab once two things are done: it has mapped the slab, and it has got the stamp of
that mover's life by the way of its loads (``cachesvc.memory.backend``). A pair (source, target) that fails the
check is refused until one of the two has a new life, or, where movers of the target ended in the check, the source:
its copies go by the host.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from cachesvc.memory.interface import Slab
from cachesvc.model.errors import CacheError
from cachesvc.mover.life import Life, StampOfLife
from cachesvc.mover.records import MoverFault, MoverGone

log = logging.getLogger(__name__)


ASKED_SECONDS = 1.0
"""Time limit of movers that are asked at once, seconds. One that hangs answers, or is ended, while others go on."""
WAITED_SECONDS, WAITED_OF_SECONDS = 0.5, 30.0
"""Seconds that callers wait for another device in any time of the second length: a model has many slabs, and an engine
of a sound device may wait 1 s in all."""
DEATHS = 2
"""Movers that may die while they check one pair. One death may have another cause; a pair that kills is refused."""


@dataclass(slots=True, eq=False)
class _Peer:
    """One life of a device's mover. ``sound``: lives whose stamps it has got. ``stuck``: a pull that did not end, after
    which it checks no other pair. ``died``: lives that ended while they checked this one's stamp."""

    device: str
    life: Life
    stamp: StampOfLife | None = None
    stamping: threading.Lock = field(default_factory=threading.Lock)
    checking: threading.Lock = field(default_factory=threading.Lock)
    sound: set[_Peer] = field(default_factory=set)
    stuck: str = ""
    died: set[_Peer] = field(default_factory=set)

    @contextmanager
    def shown(self) -> Iterator[StampOfLife]:
        """Its stamp, with a descriptor that stays while it is used. Raises as ``Life.stamp``."""
        with self.stamping:
            if self.stamp is None:
                self.stamp = self.life.stamp()
            stamp = self.stamp.copy()
        try:
            yield stamp
        finally:
            stamp.close()

    def forget(self) -> None:
        """Close what is kept of an ended life. Idempotent."""
        with self.stamping:
            if self.stamp is not None:
                self.stamp.close()
                self.stamp = None


class _Known(NamedTuple):
    """A slab, its device, and the life that holds it; None where that has ended already."""

    slab: Slab
    device: str
    source: _Peer | None


class Patience:
    """Waits for other devices, which do not add up: a device that hangs, or is slow each time, has used up
    ``WAITED_SECONDS`` once, whatever the number of calls. Any thread."""

    def __init__(self) -> None:
        self._waited: dict[str, tuple[float, float]] = {}  # by device: beginning of its time, seconds used of it

    def ask(self, calls: Mapping[str, Callable[[], object]]) -> None:
        """Make a call for each device, all at once, and wait for them within the limit; late ones go on."""
        ended: dict[str, float] = {}

        def run(device: str, call: Callable[[], object]) -> None:
            try:
                call()
            finally:
                ended[device] = time.monotonic()

        threads = {
            device: threading.Thread(target=run, args=(device, call), name="mover-asked", daemon=True)
            for device, call in calls.items()
        }
        now = time.monotonic()
        for thread in threads.values():
            thread.start()
        for device, thread in threads.items():
            begun, used = self._waited.get(device, (now, 0.0))
            begun, used = (begun, used) if now < begun + WAITED_OF_SECONDS else (now, 0.0)
            thread.join(max(0.0, now + WAITED_SECONDS - used - time.monotonic()))
            took = ended.get(device, now + WAITED_SECONDS) - now
            self._waited[device] = begun, min(WAITED_SECONDS, used + took)


class PeerSlabs:
    """Slabs of all movers, and which movers know them. Any thread."""

    def __init__(self, reaches: frozenset[tuple[str, str]] | None) -> None:
        """``reaches``: (source, target) devices that the hardware connects; None: all."""
        self._reaches = reaches
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._slabs: dict[int, _Known] = {}
        self._unknown: set[tuple[int, str]] = set()  # slabs that a target does not know, by (region, target)
        self._refused: dict[tuple[str, str], str] = {}
        self._patience = Patience()

    def begin(self, device: str, life: Life) -> None:
        """Show a new life the slabs of others; those that come meanwhile reach it too, and all of them once. It is
        asked to copy from none before it has been shown it."""
        mine = _Peer(device, life)
        with self._lock:
            before = self._peers.get(device)
            self._peers[device] = mine
            self._refused = {pair: why for pair, why in self._refused.items() if self._stays_refused(pair, device)}
            regions = [
                region
                for region, each in self._slabs.items()
                if each.source is not None and self._is_wired(each.device, device)
            ]
            self._unknown.update((region, device) for region in regions)
            for peer in self._peers.values():
                peer.sound = {each for each in peer.sound if each is not before}
        if before is not None:
            before.forget()
        for region in regions:
            with self._lock:  # a slab that is there has its descriptor; others may be closed at any time
                known = self._slabs.get(region)
                tell = None if known is None or known.source is None else self._telling(mine, known.source, known.slab)
            if tell is not None:
                tell()

    def end(self, device: str) -> None:
        """Note that a device has no mover."""
        with self._lock:
            ended = self._peers.pop(device, None)
        if ended is not None:
            ended.forget()

    def close(self) -> list[Slab]:
        """Forget all lives; returns the slabs that are left."""
        for device in list(self._peers):
            self.end(device)
        with self._lock:
            return [known.slab for known in self._slabs.values()]

    def add(self, device: str, slab: Slab) -> None:
        """Show a new slab to the movers that reach it; waits for them, but not for long."""
        with self._lock:
            source = self._peers.get(device)
            self._slabs[slab.region] = _Known(slab, device, source)
            targets = [] if source is None else self._targets(device)
            self._unknown.update((slab.region, each.device) for each in targets)
        if source is not None:
            self._patience.ask({each.device: self._telling(each, source, slab) for each in targets})

    def remove(self, device: str, region: int) -> None:
        """Have movers unmap a slab, before its memory is freed; waits for them, but not for long."""
        with self._lock:
            self._slabs.pop(region, None)
            self._unknown = {each for each in self._unknown if each[0] != region}
            targets = self._targets(device)
        forget = {each.device: partial(_tolerated, partial(each.life.forget_peer, region)) for each in targets}
        self._patience.ask(forget)

    def device_of(self, region: int) -> str | None:
        """Device of a slab; None where it is closed, or never was."""
        known = self._slabs.get(region)
        return None if known is None else known.device

    def can_reach(self, source: str, target: str) -> bool:
        """True where both have movers, the target's knows all slabs of the source, and the pair is not refused."""
        with self._lock:
            is_blind = any(self._slabs[region].device == source for region, to in self._unknown if to == target)
            is_equipped = self._is_wired(source, target) and {source, target} <= self._peers.keys()
            return is_equipped and not is_blind and (source, target) not in self._refused

    def refused(self) -> dict[tuple[str, str], str]:
        """Pairs that failed their check, or have none since one into their target hangs, and why."""
        with self._lock:
            stuck = {peer.device: peer.stuck for peer in self._peers.values() if peer.stuck}
            unchecked = {(self._slabs[region].device, target) for region, target in self._unknown if target in stuck}
            return {pair: f"not checked: {stuck[pair[1]]}" for pair in unchecked} | self._refused

    # -- inside --------------------------------------------------------------------------------------------------------

    def _is_wired(self, source: str, target: str) -> bool:
        return source != target and (self._reaches is None or (source, target) in self._reaches)

    def _stays_refused(self, pair: tuple[str, str], device: str) -> bool:
        """True where a new life of a device changes nothing for a pair: it is of others, or ends movers of its target,
        and would end this one."""
        source = self._peers.get(pair[0])
        return device not in pair or (device == pair[1] and source is not None and _ends_movers(source, device))

    def _targets(self, source: str) -> list[_Peer]:
        return [peer for peer in self._peers.values() if self._is_wired(source, peer.device)]

    def _telling(self, target: _Peer, source: _Peer, slab: Slab) -> Callable[[], None]:
        """Tells a mover of another one's slab; may come late, when the slab's own descriptor is closed."""
        fd = None if slab.fd is None else os.dup(slab.fd)

        def tell() -> None:
            try:
                self._tell(target, source, slab, fd)
            finally:
                if fd is not None:
                    os.close(fd)

        return tell

    def _tell(self, target: _Peer, source: _Peer, slab: Slab, fd: int | None) -> None:
        """Have a mover map another one's slab. One that refuses is not reached from there: its loads go by the host."""
        is_known = self._is_sound(target, source) and _tolerated(
            partial(target.life.learn_peer, slab.region, slab.handle, fd)
        )
        with self._lock:
            is_there = slab.region in self._slabs
            if is_known or not is_there:
                self._unknown.discard((slab.region, target.device))
            elif self._peers.get(target.device) is target:
                self._unknown.add((slab.region, target.device))
        if is_known and not is_there:  # it was closed before the mover knew of it
            _tolerated(partial(target.life.forget_peer, slab.region))

    def _is_sound(self, target: _Peer, source: _Peer) -> bool:
        """Check the way from one life to another, once. One check at a time goes into a device."""
        pair = source.device, target.device
        with target.checking:
            with self._lock:
                if source in target.sound:
                    return True
                if pair in self._refused or target.stuck or self._peers.get(source.device) is not source:
                    return False
            wrong = self._check(target, source)
            with self._lock:
                if wrong is None:
                    target.sound.add(source)
                elif wrong and self._peers.get(source.device) is source:
                    self._refused[pair] = wrong
        return wrong is None

    def _check(self, target: _Peer, source: _Peer) -> str | None:
        """Have a mover pull another one's stamp. Returns what is wrong with the way; None: nothing; empty: unknown."""
        try:
            with source.shown() as stamp:
                try:
                    wrong, hangs = target.life.check_peer(stamp)
                except MoverGone as gone:
                    source.died.add(target)  # once, however many slabs it was asked for
                    is_cause = _ends_movers(source, target.device)
                    return f"{DEATHS} movers ended during the check ({gone})" if is_cause else ""
        except MoverGone:  # the source's own: its next life is checked
            return ""
        except (CacheError, MoverFault) as refused:
            return str(refused)
        target.stuck = wrong if hangs else ""
        return wrong or None


def _ends_movers(source: _Peer, target: str) -> bool:
    return sum(each.device == target for each in source.died) >= DEATHS


def at_once(calls: Sequence[Callable[[], object]]) -> None:
    """Make all calls, each on a thread of its own, and wait for them; for ``ASKED_SECONDS`` at most, and then those
    that are left go on."""
    threads = [threading.Thread(target=call, name="mover-asked", daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    until = time.monotonic() + ASKED_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def _tolerated(call: Callable[[], object]) -> bool:
    """Run a call; False where it was refused. A mover that dies meanwhile learns of it with its next life, or never
    again."""
    try:
        call()
    except (CacheError, MoverFault) as refused:
        log.info("mover_peer_not_told reason=%s", refused)
        return False
    return True
