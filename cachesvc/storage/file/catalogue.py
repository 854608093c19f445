"""Catalogue of objects, in the order of their last use: some 230 bytes of memory an object.

Its contents are hints. Any thread; the ledger thread's question (``expects``) takes no lock.
"""

from __future__ import annotations

import struct
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cachesvc.model.keys import KEY_BYTES
from cachesvc.storage.seam import Gone, Kept, ObjectName, Part, Scope, StoreStatus

_PART = struct.Struct(">HHH")
_SCOPE_NUMBER = struct.Struct(">I")
_SECONDS_BITS = 36
_SECONDS = (1 << _SECONDS_BITS) - 1
OLDEST_LOOKS = 4096
AT_ONCE = 512
"""Objects that are added while others wait: some milliseconds."""


class Entry(NamedTuple):
    """An object's size on disk, and when it was used last (seconds since 1970)."""

    name: ObjectName
    size_bytes: int
    used: int


class Catalogue:
    """``objects`` and ``size_bytes`` of all; objects that are being read are not given out for eviction. ``gone``:
    called with those that are."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.gone: Gone | None = None
        self._entries: OrderedDict[bytes, int] = OrderedDict()
        self._scopes: list[Scope] = []
        self._numbers: dict[Scope, bytes] = {}
        self._kept: dict[Scope, Kept] = {}
        self._labels: dict[Scope, str] = {}
        self._reading: Counter[bytes] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: ObjectName) -> bool:
        return self._packed(name) in self._entries

    def expects(self, scope: Scope, keys: bytes, parts: Sequence[Part]) -> int:
        """Number of leading keys of which all ``parts`` are here."""
        number = self._numbers.get(scope)
        if number is None:
            return 0
        entries, tails = self._entries, [_PART.pack(*part) for part in parts]
        for at in range(0, len(keys), KEY_BYTES):
            key = number + keys[at : at + KEY_BYTES]
            for tail in tails:
                if key + tail not in entries:
                    return at // KEY_BYTES
        return len(keys) // KEY_BYTES

    def add(self, name: ObjectName, size_bytes: int, used: int) -> None:
        """Add an object as the most recently used one."""
        with self._lock:
            self._add(name, size_bytes, used)

    def add_all(self, entries: Sequence[Entry]) -> None:
        """Objects that were found, the longest unused first: they go before those that are known. Lets others in
        between."""
        for end in range(len(entries), 0, -AT_ONCE):
            with self._lock:
                for each in reversed(entries[max(0, end - AT_ONCE) : end]):
                    key = self._number(each)
                    if key not in self._entries:
                        self._add(*each)
                        self._entries.move_to_end(key, last=False)

    def drop(self, name: ObjectName) -> bool:
        """An object is not there any more. False where it was not known."""
        with self._lock:
            return self._drop(self._packed(name))

    def use(self, name: ObjectName, now: int) -> int | None:
        """Note a use; returns the time of the last one, None for an unknown object."""
        key = self._packed(name)
        with self._lock:
            value = self._entries.get(key)
            if value is None:
                return None
            self._entries[key] = value & ~_SECONDS | now
            self._entries.move_to_end(key)
            return value & _SECONDS

    def begin_read(self, name: ObjectName) -> None:
        """Protect an object from being overwritten for a while, known or not: it may be found meanwhile."""
        with self._lock:
            self._of(name.scope)
            self._reading[self._packed(name)] += 1

    def end_read(self, name: ObjectName) -> None:
        """Note the end of a read."""
        key = self._packed(name)
        with self._lock:
            self._reading[key] -= 1
            if not self._reading[key]:
                del self._reading[key]

    def take_oldest(self, most: int, until_bytes: int, before: int | None = None) -> list[Entry]:
        """Take out objects that were used longest ago, ``most`` at most and until ``until_bytes`` are left or less; or
        (``before``) those not used since then."""
        with self._lock:
            victims: list[Entry] = []
            left = self.size_bytes
            for key, value in self._entries.items():
                if len(victims) >= most or (left <= until_bytes and (before is None or value & _SECONDS >= before)):
                    break
                if key not in self._reading:
                    entry = Entry(self._name(key), value >> _SECONDS_BITS, value & _SECONDS)
                    victims.append(entry)
                    left -= entry.size_bytes
            for entry in victims:
                self._drop(self._packed(entry.name))
        if victims and self.gone is not None:
            self.gone([entry.name for entry in victims])
        return victims

    def names(self, scope: Scope | None = None) -> list[ObjectName]:
        """Names of all objects, or of a scope's."""
        with self._lock:
            number = None if scope is None else self._numbers.get(scope, b"none")
            return [self._name(key) for key in self._entries if number is None or key.startswith(number)]

    def describe(self, scope: Scope, label: str) -> None:
        """Set the label of a scope. Takes no lock."""
        self._labels[scope] = label

    def status(self, now: int) -> StoreStatus:
        """Counts by scope. Of ages what a look at the oldest and the newest few tells."""
        with self._lock:
            out = StoreStatus(len(self._entries), self.size_bytes)
            for scope, kept in self._kept.items():
                if kept.objects:
                    out.scopes[scope] = Kept(self._labels.get(scope, ""), kept.objects, kept.size_bytes)
            for key, used in _few(iter(self._entries.items())):
                kept = out.scopes[self._scopes[_SCOPE_NUMBER.unpack_from(key)[0]]]
                kept.oldest_seconds = max(0.0, now - used, kept.oldest_seconds or 0.0)
            for key, used in _few(reversed(self._entries.items())):
                kept = out.scopes[self._scopes[_SCOPE_NUMBER.unpack_from(key)[0]]]
                age = float(max(0, now - used))
                kept.newest_seconds = age if kept.newest_seconds is None else min(kept.newest_seconds, age)
        return out

    def _add(self, name: ObjectName, size_bytes: int, used: int) -> None:
        key = self._number(Entry(name, size_bytes, used))
        self._drop(key)
        self._entries[key] = size_bytes << _SECONDS_BITS | used
        self.size_bytes += size_bytes
        kept = self._of(name.scope)
        kept.objects += 1
        kept.size_bytes += size_bytes

    def _drop(self, key: bytes) -> bool:
        value = self._entries.pop(key, None)
        if value is None:
            return False
        self.size_bytes -= value >> _SECONDS_BITS
        kept = self._kept[self._scopes[_SCOPE_NUMBER.unpack_from(key)[0]]]
        kept.objects -= 1
        kept.size_bytes -= value >> _SECONDS_BITS
        return True

    def _of(self, scope: Scope) -> Kept:
        if scope not in self._kept:
            self._kept[scope] = Kept("")
            self._scopes.append(scope)
            self._numbers[scope] = _SCOPE_NUMBER.pack(len(self._scopes) - 1)
        return self._kept[scope]

    def _number(self, entry: Entry) -> bytes:
        self._of(entry.name.scope)
        return self._packed(entry.name)

    def _packed(self, name: ObjectName) -> bytes:
        number = self._numbers.get(name.scope)
        return b"" if number is None else number + name.key + _PART.pack(*name.part)

    def _name(self, key: bytes) -> ObjectName:
        scope = self._scopes[_SCOPE_NUMBER.unpack_from(key)[0]]
        return ObjectName(scope, key[4 : 4 + KEY_BYTES], Part(*_PART.unpack_from(key, 4 + KEY_BYTES)))


def _few(entries: Iterator[tuple[bytes, int]]) -> Iterator[tuple[bytes, int]]:
    for _, (key, value) in zip(range(OLDEST_LOOKS), entries, strict=False):
        yield key, value & _SECONDS
