"""Block keys: a chained hash over canonical bytes, under the namespace that a registration names.

    key i = BLAKE2b-256(parent, block_tokens, tokens as little-endian u32, extras), 32 bytes; person "kv-block"

The parent of block 0 is the namespace, so key i stands for the whole prefix. The extras of a block are what tokens
alone do not say: for each kind, in its name's order, the digests that touch the block and the tokens that they cover,
in the order of these. The kind without a name comes first and is always there; numbers are little-endian u32, so no two
lists read alike:

    extras = spans, then for each named kind that touches the block: length, name, spans
    spans  = count, then for each: start, end, length, digest

Start (i64) and end count from the block's first token. The end is at most the block's; the start is negative where the
extra began in an earlier block, so the second half of an image is not the first half of the next one.

A last block that is not full has a key only where it is handed over from one engine to another: BLAKE2b-256(parent,
block_tokens, how many tokens, these, extras), person "kv-tail".
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from cachesvc.model.words import KEY_BYTES
from cachesvc_client.core.errors import InvalidRequest

MAX_EXTRA_BYTES = 4096
MAX_KIND_BYTES = 64
PROMPT_END = 1 << 62
"""End of an extra key that holds for every token, those still to be computed included."""

PackedKeys = bytes | bytearray | memoryview
"""Keys of ``KEY_BYTES`` each in a row, root to leaf; anything else that has contiguous bytes does too."""

_PERSON = b"kv-block"
_TAIL_PERSON = b"kv-tail"
_NO_EXTRA = struct.pack("<I", 0)
_SPAN = struct.Struct("<qII")


@dataclass(frozen=True, slots=True, order=True)
class ExtraKey:
    """Input beside the tokens of ``[start_token, end_token)``: an image's digest, an adapter's name.

    Extras of one ``kind`` must not overlap; those of two kinds may, so an image and an adapter can be on one block.
    """

    start_token: int
    end_token: int
    digest: bytes
    kind: str = ""

    @classmethod
    def of_prompt(cls, kind: str, digest: bytes) -> ExtraKey:
        """Extra key of a whole prompt and all that is computed after it, such as a LoRA adapter.

        Unlike a tenant's salt it needs no separate pool: blocks of all adapters share the model's.
        """
        return cls(0, PROMPT_END, digest, kind)


def extras_for_block(
    extras: Sequence[ExtraKey], start_token: int, end_token: int, cursor: int
) -> tuple[list[tuple[int, int, bytes]], int]:
    """Start, end and digest of each extra that touches ``[start_token, end_token)``, and the cursor for the next block.

    Start and end are relative to ``start_token``; the end is clipped to the block, the start is not. ``extras`` are
    sorted by start. An extra that ends exactly at ``start_token`` contributes nothing; one that reaches
    beyond ``end_token`` is counted here and again in the next block.
    """
    found: list[tuple[int, int, bytes]] = []
    index = cursor
    while index < len(extras):
        extra = extras[index]
        if extra.end_token <= start_token:
            index += 1
            continue
        if extra.start_token >= end_token:
            return found, index
        until = min(extra.end_token, end_token)
        found.append((extra.start_token - start_token, until - start_token, extra.digest))
        if extra.end_token > end_token:
            return found, index
        index += 1
    return found, max(cursor, len(extras) - 1)


@dataclass(slots=True)
class _Track:
    """The extras of one kind by start, and which of them the next block has to look at first."""

    head: bytes
    extras: tuple[ExtraKey, ...]
    cursor: int = 0

    def bytes_for(self, start_token: int, end_token: int) -> bytes:
        """Bytes that the kind adds to the block of these tokens."""
        spans, self.cursor = extras_for_block(self.extras, start_token, end_token, self.cursor)
        if self.head and not spans:
            return b""
        packed_spans = [_SPAN.pack(start, end, len(digest)) + digest for start, end, digest in spans]
        return self.head + struct.pack("<I", len(spans)) + b"".join(packed_spans)


@dataclass(slots=True)
class BlockHasher:
    """The keys of one sequence, extended as tokens arrive and kept with the request.

    ``extend`` may be called with any number of tokens; only full blocks get keys.
    """

    namespace: bytes
    block_tokens: int
    extras: tuple[ExtraKey, ...] = ()
    keys: bytearray = field(default_factory=bytearray)
    _tail: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    _tracks: list[_Track] = field(default_factory=list)

    def __post_init__(self) -> None:
        namespace: object = self.namespace
        if not isinstance(namespace, bytes) or len(namespace) != KEY_BYTES:
            raise InvalidRequest(
                f"a namespace is {KEY_BYTES} bytes, such as Registration.namespace, not {self.namespace!r:.80}"
            )
        block_tokens: object = self.block_tokens
        if not isinstance(block_tokens, int) or block_tokens < 1:
            raise InvalidRequest(f"block_tokens must be a positive whole number, got {self.block_tokens!r}")
        self.extras = tuple(sorted(self.extras, key=attrgetter("kind", "start_token", "end_token", "digest")))
        for extra in self.extras:
            if not 0 <= extra.start_token < extra.end_token or len(extra.digest) > MAX_EXTRA_BYTES:
                raise InvalidRequest(
                    f"bad extra key for tokens [{extra.start_token}, {extra.end_token}): it needs a token, and at most "
                    f"{MAX_EXTRA_BYTES} bytes of digest"
                )
        self._tracks = [_Track(b"", ())] if self.extras and self.extras[0].kind else []
        for kind, those in groupby(self.extras, key=attrgetter("kind")):
            self._tracks.append(_track(kind, tuple(those)))

    @property
    def blocks(self) -> int:
        return len(self.keys) // KEY_BYTES

    def key(self, block: int) -> bytes:
        return bytes(self.keys[block * KEY_BYTES : (block + 1) * KEY_BYTES])

    def extend(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> int:
        """Add tokens (each in 0 .. 2^32 - 1); returns how many blocks are full now. Raises InvalidRequest."""
        fresh = _as_u32(tokens)
        pending = np.concatenate((self._tail, fresh)) if len(self._tail) else fresh
        count = len(pending) // self.block_tokens
        if count:
            self._hash_blocks(pending[: count * self.block_tokens].tobytes(), count)
        self._tail = pending[count * self.block_tokens :].copy()
        return self.blocks

    @property
    def tail_tokens(self) -> int:
        return len(self._tail)

    def tail_key(self) -> bytes:
        """Key of the last block, which is not full, with its length: no full block has it, and no tail of another
        length. Under it a prefill hands that block over; the decoding engine copies it to a private page, because
        its rest will be written. Empty where all blocks are full."""
        if not len(self._tail):
            return b""
        start = self.blocks * self.block_tokens
        cursors = [track.cursor for track in self._tracks]
        extras = b"".join([track.bytes_for(start, start + len(self._tail)) for track in self._tracks])
        for track, cursor in zip(self._tracks, cursors, strict=True):  # the full block is still to be hashed
            track.cursor = cursor
        parent = self.key(self.blocks - 1) if self.blocks else self.namespace
        return tail_digest(parent, self.block_tokens, self._tail, extras or _NO_EXTRA)

    def _hash_blocks(self, raw: bytes, count: int) -> None:
        step = 4 * self.block_tokens
        first = self.blocks
        parent = self.key(first - 1) if first else self.namespace
        head = struct.pack("<I", self.block_tokens)
        out = self.keys
        blake2b = hashlib.blake2b
        if not self.extras:
            for at in range(0, count * step, step):
                parent = blake2b(
                    parent + head + raw[at : at + step] + _NO_EXTRA, digest_size=KEY_BYTES, person=_PERSON
                ).digest()
                out += parent
            return
        for i in range(count):
            start = (first + i) * self.block_tokens
            tail = b"".join([track.bytes_for(start, start + self.block_tokens) for track in self._tracks])
            body = parent + head + raw[i * step : (i + 1) * step] + tail
            parent = blake2b(body, digest_size=KEY_BYTES, person=_PERSON).digest()
            out += parent


def tail_digest(
    parent: bytes, block_tokens: int, tokens: Sequence[int] | npt.NDArray[np.integer], extras: bytes
) -> bytes:
    """Key of the ``tokens`` (each in 0 .. 2^32 - 1) of a block that is not full. Raises InvalidRequest."""
    body = parent + struct.pack("<II", block_tokens, len(tokens)) + _as_u32(tokens).tobytes()
    return hashlib.blake2b(body + extras, digest_size=KEY_BYTES, person=_TAIL_PERSON).digest()


def packed(keys: PackedKeys) -> memoryview:
    """Keys as bytes in a row, without a copy. Raises InvalidRequest for what is not bytes."""
    wanted = f"keys are bytes, {KEY_BYTES} for each block, such as BlockHasher.keys"
    try:
        given = memoryview(keys)
        view = given.cast("B")
    except TypeError as error:
        raise InvalidRequest(f"{wanted}, not {type(keys).__name__}: {error}") from error
    if given.itemsize not in (1, KEY_BYTES) and given.ndim < 2:
        kind = f"{type(keys).__name__} of numbers of {given.itemsize} bytes"
        raise InvalidRequest(f"{wanted}; this is a {kind}, as tokens are: pass lease.hasher(tokens).keys")
    return view


def as_bytes(keys: PackedKeys) -> bytes:
    """Keys as bytes in a row, copied unless they are that. Raises InvalidRequest for what is not bytes."""
    return keys if type(keys) is bytes else bytes(packed(keys))


def block_keys(
    namespace: bytes,
    tokens: Sequence[int] | npt.NDArray[np.integer],
    block_tokens: int,
    extras: Sequence[ExtraKey] = (),
) -> bytes:
    """Packed keys (``KEY_BYTES`` each) of the full blocks of ``tokens``."""
    hasher = BlockHasher(namespace, block_tokens, tuple(extras))
    hasher.extend(tokens)
    return bytes(hasher.keys)


def _track(kind: str, extras: tuple[ExtraKey, ...]) -> _Track:
    name = kind.encode()
    if len(name) > MAX_KIND_BYTES:
        raise InvalidRequest(
            f"the kind of an extra key has {len(name)} bytes, at most {MAX_KIND_BYTES} may be: {kind!r}"
        )
    for left, right in pairwise(extras):
        if right.start_token < left.end_token:
            raise InvalidRequest(
                f"extra keys of kind {kind!r} overlap at token {right.start_token}; give what lies on the same tokens "
                "different kinds"
            )
    return _Track(struct.pack("<I", len(name)) + name if name else b"", extras)


def _as_u32(tokens: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.uint32]:
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, np.uint32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequest(f"tokens must be a flat list of integers, got {array.dtype} of shape {array.shape}")
    if array.dtype != np.uint32:
        if int(array.min()) < 0 or int(array.max()) >= 1 << 32:
            raise InvalidRequest("a token is outside of 0 .. 2^32 - 1")
        array = array.astype("<u4")
    return np.ascontiguousarray(array)
