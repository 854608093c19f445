"""LRU shadow beside another policy: the hits that LRU would have had, from a sample of keys alone.

A prompt's blocks are used together, the root last, so a block that is there has all above it: each block of a sample
tells by itself whether it would have been a hit. Keys are hashes, so those that end in some bytes are such a sample,
and a cache of as small a part of the blocks behaves like the whole.
"""

from __future__ import annotations

from collections import OrderedDict

from cachesvc.model.keys import KEY_BYTES

SAMPLED_KEYS = 4096
"""Keys that are kept at most, some 0.6 MiB, where the cache has at most 256 times as many blocks."""
PARTS = 256


class ShadowLru:
    """LRU of a cache of ``blocks`` blocks. Counts are of blocks, of the whole as far as the sample tells: ``asked``,
    ``hits`` that the policy in place had, ``shadow_hits`` that LRU would have had."""

    def __init__(self, blocks: int) -> None:
        self.asked = self.hits = self.shadow_hits = 0
        self._scale = 1
        while self._scale < PARTS and blocks > SAMPLED_KEYS * self._scale:
            self._scale *= 2
        self._is_sampled = bytes(value % self._scale == 0 for value in range(PARTS))
        self._most = max(1, blocks // self._scale)
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def matched(self, keys: bytes, asked: int, hit: int) -> None:
        """A prompt of packed ``keys``, of whose first ``asked`` blocks ``hit`` were a hit. All of it is used."""
        known, scale = self._known, self._scale
        sampled = keys[KEY_BYTES - 1 :: KEY_BYTES].translate(self._is_sampled)
        at = sampled.rfind(1)
        while at >= 0:  # deepest first: the root is used last
            key = keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
            if at < asked:
                self.asked += scale
                self.hits += scale * (at < hit)
                self.shadow_hits += scale * (key in known)
            known[key] = None
            known.move_to_end(key)
            at = sampled.rfind(1, 0, at)
        while len(known) > self._most:
            known.popitem(last=False)
