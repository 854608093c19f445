"""Digest of what a node has, some bits a block: it may take a block for there that is not, and never the reverse.

The lender counts, so that blocks can leave; others get its bits, first all of them and then those that flipped since. A
key is a hash already: parts of it are the numbers of its bits.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

HASHES = 4
LEAST_BITS, MOST_BITS = 1 << 13, 1 << 22
BITS_A_BLOCK = 10
"""About one in a hundred blocks that are not there is taken for one that is."""
MOST_FLIPS = 1 << 16
"""Flips that are remembered; a reader that is further behind gets all bits."""
MOST_COUNT = (1 << 16) - 1
FULL_SHARE = 0.9
"""Share of bits set from which on a digest says nothing: two in three blocks that are not there seem to be."""
_WORDS = struct.Struct(f"<{HASHES}Q")


class DigestNews(NamedTuple):
    """State ``version`` of a digest of the life ``epoch``: all ``bits``, or (empty) what ``flips`` since the version
    that was asked for, packed numbers of bits."""

    epoch: int
    version: int
    bits: bytes
    flips: bytes


def bits_for(blocks: int) -> int:
    """Number of bits for a number of blocks, a power of two."""
    return min(MOST_BITS, max(LEAST_BITS, 1 << (BITS_A_BLOCK * blocks).bit_length()))


def words_of(key: bytes) -> tuple[int, ...]:
    """The words of a key, of which bits' numbers are made."""
    return _WORDS.unpack(key)


def numbers_of(keys: bytes, bits: int) -> Any:
    """Numbers of the bits of packed keys, a row for each."""
    return np.frombuffer(keys, "<u8").reshape(-1, HASHES) & np.uint64(bits - 1)


class CountedDigest:
    """PeerDigest of this node's copies. ``size``: bits; ``version`` counts changes from 1 on."""

    def __init__(self, bits: int) -> None:
        self.version = 1
        self.size = bits
        self._set = 0
        self._counts = np.zeros(bits, np.uint16)
        self._flips: deque[tuple[int, Any]] = deque()
        self._remembered = 0
        self._forgotten = 1

    @property
    def is_saturated(self) -> bool:
        """True where nearly all bits are set, so that it tells nothing."""
        return self._set > FULL_SHARE * self.size

    def change(self, keys: bytes, *, came: bool) -> None:
        """Copies of packed keys have come, or gone."""
        numbers = numbers_of(keys, self.size).reshape(-1).astype(np.int64)
        touched, times = np.unique(numbers, return_counts=True)
        before = self._counts[touched].astype(np.int64)
        after = np.clip(before + times if came else before - times, 0, MOST_COUNT)
        self._counts[touched] = np.where(before == MOST_COUNT, MOST_COUNT, after)  # a full counter stays
        flipped = touched[(before > 0) != (self._counts[touched] > 0)].astype("<u4")
        self._set += len(flipped) if came else -len(flipped)
        if not len(flipped):
            return
        self.version += 1
        self._flips.append((self.version, flipped))
        self._remembered += len(flipped)
        while self._remembered > MOST_FLIPS:
            self._forgotten, gone = self._flips.popleft()
            self._remembered -= len(gone)

    def news(self, epoch: int, known_version: int) -> DigestNews:
        """Changes since a version that a reader knows; 0: it knows none."""
        if not self._forgotten <= known_version <= self.version:
            bits = np.packbits(self._counts > 0, bitorder="little").tobytes()
            return DigestNews(epoch, self.version, bits, b"")
        flips = [flipped for version, flipped in self._flips if version > known_version]
        return DigestNews(epoch, self.version, b"", b"".join(each.tobytes() for each in flips))


class PeerDigest:
    """Another node's digest, as far as it has told: ``bits``, empty until it has. Any thread may read; one writes."""

    def __init__(self) -> None:
        self.epoch = 0
        self.version = 0
        self.bits = b""
        self.is_saturated = False

    @property
    def is_known(self) -> bool:
        """True once the node has told which blocks it has. One that seems to have all of them has not."""
        return bool(self.bits) and not self.is_saturated

    def learn(self, news: DigestNews) -> None:
        if news.bits:
            count = len(news.bits)
            if count & (count - 1) or not LEAST_BITS <= 8 * count <= MOST_BITS:
                self.forget()
                return
            self.bits = news.bits
        elif news.flips:
            if news.epoch != self.epoch or len(news.flips) % 4 or not self.bits:
                self.forget()
                return
            bits = np.frombuffer(self.bits, np.uint8).copy()
            flips = np.frombuffer(news.flips, "<u4") % np.uint32(8 * len(bits))
            np.bitwise_xor.at(bits, flips >> 3, np.uint8(1) << (flips & 7).astype(np.uint8))
            self.bits = bits.tobytes()
        self.epoch, self.version = news.epoch, news.version
        if news.bits or news.flips:
            self.is_saturated = int.from_bytes(self.bits, "little").bit_count() > FULL_SHARE * 8 * len(self.bits)

    def forget(self) -> None:
        """Know nothing of the node any more."""
        self.epoch, self.version, self.bits, self.is_saturated = 0, 0, b"", False

    def has(self, words: Sequence[int]) -> bool:
        """True where the node has the block of these words of a key, most likely."""
        bits = self.bits
        mask = 8 * len(bits) - 1
        for word in words:
            number = word & mask
            if not bits or not bits[number >> 3] >> (number & 7) & 1:
                return False
        return True

    def reach(self, keys: Sequence[bytes]) -> int:
        """Count the first keys that the node has, most likely: it has no block without those above."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) >> 1
            if self.has(words_of(keys[middle - 1])):
                low = middle
            else:
                high = middle - 1
        return low
