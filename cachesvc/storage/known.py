"""Objects of a shared store as far as this daemon knows: listed, written or read here. Hints, never hits.

Other daemons write and the store deletes meanwhile. What is unknown has to be asked for; what was asked for and was
absent is remembered for a while, so that a prompt that is asked again costs no question.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cachesvc.model.words import KEY_BYTES
from cachesvc.storage.seam import Kept, ObjectName, Part, Scope, StoreStatus
from cachesvc.storage.workers import UnderWay

MOST_KNOWN = 1 << 19
"""Objects that are remembered, some 220 bytes each. Others are asked for."""
MOST_ABSENT = 1 << 16
ROUND_MASK = (1 << 32) - 1
DROPPED_AT_ONCE = 1024
"""Objects that are forgotten while others wait: about a millisecond."""
_PART = struct.Struct("<3H")
_NUMBER = struct.Struct("<I")


class Fact(NamedTuple):
    """Facts of an object, kept as one number: a tuple for each takes twice the memory. ``round``: the last listing that
    has seen it, or that was under way when it was written."""

    size_bytes: int
    seconds: int
    round: int

    @classmethod
    def of(cls, packed: int) -> Fact:
        return cls(packed >> 80, packed >> 32 & (1 << 48) - 1, packed & ROUND_MASK)

    @property
    def packed(self) -> int:
        return self.size_bytes << 80 | max(0, self.seconds) << 32 | self.round


class KnownObjects:
    """The last ``most`` objects that were noted. ``absent_seconds``: for which a miss is remembered. ``leaving``: those
    that are being removed, or looked at again. ``clock``: monotonic seconds. Any thread."""

    def __init__(
        self, absent_seconds: float = 0.0, clock: Callable[[], float] = time.monotonic, most: int = MOST_KNOWN
    ) -> None:
        self._most = most
        self._facts: dict[bytes, int] = {}
        self._absent: OrderedDict[bytes, float] = OrderedDict()
        self._absent_seconds = absent_seconds
        self._clock = clock
        self._numbers: dict[Scope, bytes] = {}
        self._scopes: list[Scope] = []
        self._labels: dict[Scope, str] = {}
        self._lock = threading.Lock()
        self.leaving = UnderWay[ObjectName]()
        self._round = 0
        self.size_bytes = 0
        self.is_complete = False

    def __len__(self) -> int:
        return len(self._facts)

    def __contains__(self, name: ObjectName) -> bool:
        return self._packed(name.scope, name.key, name.part) in self._facts

    def describe(self, scope: Scope, label: str) -> bool:
        """Set the label of a scope; False where it has that already."""
        with self._lock:
            self._number(scope)
            is_new = self._labels.get(scope) != label
            self._labels[scope] = label
        return is_new

    def names(self) -> list[ObjectName]:
        """Names of all objects, the one that was noted longest ago first."""
        with self._lock:
            split = [(packed[:4], packed[4 : 4 + KEY_BYTES], packed[4 + KEY_BYTES :]) for packed in self._facts]
            scopes = {number: scope for scope, number in self._numbers.items()}
        return [ObjectName(scopes[number], key, Part(*_PART.unpack(part))) for number, key, part in split]

    def unlabelled(self) -> list[Scope]:
        with self._lock:
            return [scope for scope in self._scopes if scope not in self._labels]

    def add(self, name: ObjectName, size_bytes: int, seconds: int) -> None:
        """Note an object that is there; ``seconds`` since 1970: its age."""
        with self._lock:
            self._number(name.scope)
            packed = self._packed(name.scope, name.key, name.part)
            self._drop(packed)
            self._absent.pop(packed, None)
            self._facts[packed] = Fact(size_bytes, seconds, self._round).packed
            self.size_bytes += size_bytes
            if len(self._facts) > self._most:
                self._drop(next(iter(self._facts)))

    def drop(self, name: ObjectName) -> None:
        """Note that there is no such object now."""
        with self._lock:
            packed = self._packed(name.scope, name.key, name.part)
            self._drop(packed)
            if self._absent_seconds:
                self._absent[packed] = self._clock() + self._absent_seconds
            if len(self._absent) > MOST_ABSENT:
                self._absent.popitem(last=False)

    def hide(self, names: Sequence[ObjectName]) -> None:
        """Note that there are no such objects while they are ``leaving``."""
        self.leaving.begin(names)
        for name in names:
            self.drop(name)

    def expects(self, scope: Scope, keys: bytes, parts: Sequence[Part]) -> int | None:
        """Number of leading keys whose parts are all known, or 0 where the first was absent a moment ago; None where
        that has to be asked."""
        number = self._numbers.get(scope, b"")
        ends = [_PART.pack(*part) for part in parts]
        facts, count = self._facts, 0
        for at in range(0, len(keys), KEY_BYTES):
            start = number + keys[at : at + KEY_BYTES]
            if not all(start + end in facts for end in ends):
                break
            count += 1
        if count or not keys:
            return count
        until = [self._absent.get(number + keys[:KEY_BYTES] + end, 0.0) for end in ends]
        return 0 if number and max(until, default=0.0) > self._clock() else None

    def begin_listing(self) -> int:
        """Begin a listing of the bucket; returns its number."""
        with self._lock:
            self._round += 1
            return self._round

    def end_listing(self, number: int) -> None:
        """Forget what a whole listing has not seen and what was not written meanwhile."""
        with self._lock:
            gone = [packed for packed, fact in self._facts.items() if fact & ROUND_MASK < number]
        for first in range(0, len(gone), DROPPED_AT_ONCE):
            with self._lock:
                for packed in gone[first : first + DROPPED_AT_ONCE]:
                    if self._facts.get(packed, number) & ROUND_MASK < number:  # else it was written meanwhile
                        self._drop(packed)
        self.is_complete = True

    def forget(self, scope: Scope | None) -> None:
        """Forget all of a scope, or all."""
        with self._lock:
            start = b"" if scope is None else self._number(scope)
            gone = [packed for packed in self._facts if packed.startswith(start)]
            for packed in gone:
                self._drop(packed)

    def status(self, now: int) -> StoreStatus:
        """Sums by scope, with ages at ``now`` (seconds since 1970)."""
        with self._lock:
            kept = {scope: Kept(self._labels.get(scope, "")) for scope in self._scopes}
            by_number = {self._numbers[scope]: each for scope, each in kept.items()}
            facts = list(self._facts.items())
        size_bytes = 0
        for packed, number in facts:
            fact = Fact.of(number)
            of, age = by_number[packed[: _NUMBER.size]], float(max(0, now - fact.seconds))
            of.objects += 1
            of.size_bytes += fact.size_bytes
            size_bytes += fact.size_bytes
            of.newest_seconds = age if of.newest_seconds is None else min(of.newest_seconds, age)
            of.oldest_seconds = age if of.oldest_seconds is None else max(of.oldest_seconds, age)
        return StoreStatus(len(facts), size_bytes, is_complete=self.is_complete, scopes=kept)

    def _number(self, scope: Scope) -> bytes:
        known = self._numbers.get(scope)
        if known is None:
            known = self._numbers[scope] = _NUMBER.pack(len(self._scopes))
            self._scopes.append(scope)
        return known

    def _packed(self, scope: Scope, key: bytes, part: Part) -> bytes:
        return self._numbers.get(scope, b"") + key + _PART.pack(*part)

    def _drop(self, packed: bytes) -> None:
        fact = self._facts.pop(packed, None)
        if fact is not None:
            self.size_bytes -= Fact.of(fact).size_bytes
