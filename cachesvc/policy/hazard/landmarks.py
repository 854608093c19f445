"""Landmarks of segments that have left the cache: they are known by their keys until their request is forgotten."""

from __future__ import annotations


class Landmarks:
    """``segment_of``: by key, whose landmark it was last. Not to be written."""

    def __init__(self) -> None:
        self.segment_of: dict[bytes, int] = {}
        self._keys: dict[int, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self.segment_of)

    def remember(self, segment: int, key: bytes) -> None:
        """A landmark of the segment has left the cache."""
        self.segment_of[key] = segment
        self._keys.setdefault(segment, []).append(key)

    def forget(self, segment: int) -> None:
        """Stop following the segment."""
        for key in self._keys.pop(segment, ()):
            if self.segment_of.get(key) == segment:
                del self.segment_of[key]
