"""A mapping of keys in many small parts, so that no single insertion moves all that is known.

Resizing a dict rehashes every entry at once: with a million keys that is some 60 ms now and then, in the middle of a
call. In parts it is a quarter of a millisecond.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from typing import TypeVar, overload

Value = TypeVar("Value")
Default = TypeVar("Default")
PARTS = 256


class PartedDict(MutableMapping[bytes, Value]):
    """``parts[key[-1]]`` holds a key: keys are hashes, so they spread. Bulk look-ups may read ``parts``."""

    def __init__(self) -> None:
        self.parts: list[dict[bytes, Value]] = [{} for _ in range(PARTS)]

    def __getitem__(self, key: bytes) -> Value:
        return self.parts[key[-1]][key]

    def __setitem__(self, key: bytes, value: Value) -> None:
        self.parts[key[-1]][key] = value

    def __delitem__(self, key: bytes) -> None:
        del self.parts[key[-1]][key]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and key in self.parts[key[-1]]

    def __iter__(self) -> Iterator[bytes]:
        for part in self.parts:
            yield from part

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @overload
    def get(self, key: bytes) -> Value | None: ...

    @overload
    def get(self, key: bytes, default: Value | Default) -> Value | Default: ...

    def get(self, key: bytes, default: Value | Default | None = None) -> Value | Default | None:
        """Value of ``key``, or ``default``."""
        return self.parts[key[-1]].get(key, default)


class KeyQueue:
    """Distinct keys, first in first out. A dict whose first keys are deleted rehashes all that is left now and then.
    ``known``: the same keys, read-only."""

    def __init__(self) -> None:
        self._order: deque[bytes] = deque()
        self.known: PartedDict[None] = PartedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: bytes) -> bool:
        return key in self.known

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._order)

    def extend(self, keys: Iterable[bytes]) -> None:
        """Add keys that are not there, in their order."""
        for key in keys:
            if key not in self.known:
                self.known[key] = None
                self._order.append(key)

    @property
    def first(self) -> bytes:
        """The oldest key. Raises IndexError where there is none."""
        return self._order[0]

    def drop_first(self) -> None:
        """Remove the oldest key. Raises IndexError where there is none."""
        del self.known[self._order.popleft()]
