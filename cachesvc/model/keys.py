"""Block keys: a chained hash over canonical bytes, under a namespace.

Key of block i = BLAKE2b-256(parent key, tokens as little-endian u32, extra keys), the parent of block 0 being the
namespace. So key i stands for the whole prefix, and equal keys in two namespaces cannot be. BLAKE2b is RFC 7693.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cachesvc.model.errors import InvalidRequest

KEY_BYTES = 32
MAX_EXTRA_BYTES = 4096
_PERSON = b"kv-block"
_NO_EXTRA = struct.pack("<I", 0)


@dataclass(frozen=True, slots=True, order=True)
class ExtraKey:
    """What tokens alone do not say about ``[start_token, end_token)``: an image's digest, an adapter's name."""

    start_token: int
    end_token: int
    digest: bytes


def namespace_of(model: str, layout_fingerprint: bytes, tenant_salt: bytes = b"", tenant: str = "") -> bytes:
    """32 bytes under which keys live: model, layout, salt and tenant. Nothing is ever shared across two of them.

    ``tenant`` is the name that the daemon itself knows the caller by: no salt leads into another tenant's namespaces.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"kv-namespace")
    for part in (model.encode(), layout_fingerprint, tenant_salt, *((tenant.encode(),) if tenant else ())):
        digest.update(struct.pack("<I", len(part)))
        digest.update(part)
    return digest.digest()


def extras_for_block(
    extras: Sequence[ExtraKey], start_token: int, end_token: int, cursor: int
) -> tuple[list[bytes], int]:
    """Digests that touch ``[start_token, end_token)``, and the cursor for the next block.

    ``extras`` are sorted by start. An extra that ends exactly at ``start_token`` contributes nothing; one that reaches
    beyond ``end_token`` is counted here and again in the next block.
    """
    found: list[bytes] = []
    index = cursor
    while index < len(extras):
        extra = extras[index]
        if extra.end_token <= start_token:
            index += 1
            continue
        if extra.start_token >= end_token:
            return found, index
        found.append(extra.digest)
        if extra.end_token > end_token:
            return found, index
        index += 1
    return found, max(cursor, len(extras) - 1)


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
    _cursor: int = 0

    def __post_init__(self) -> None:
        if len(self.namespace) != KEY_BYTES:
            raise InvalidRequest(f"a namespace has {KEY_BYTES} bytes, got {len(self.namespace)}")
        if self.block_tokens < 1:
            raise InvalidRequest(f"block_tokens must be positive, got {self.block_tokens}")
        self.extras = tuple(sorted(self.extras))
        for extra in self.extras:
            if not 0 <= extra.start_token < extra.end_token or len(extra.digest) > MAX_EXTRA_BYTES:
                raise InvalidRequest(f"bad extra key for tokens [{extra.start_token}, {extra.end_token})")
        for left, right in pairwise(self.extras):
            if right.start_token < left.end_token:
                raise InvalidRequest(
                    f"extra keys overlap at token {right.start_token}; what holds for a whole prompt (an adapter, "
                    "a tenant) belongs into the namespace's salt"
                )

    @property
    def blocks(self) -> int:
        """Full blocks hashed so far."""
        return len(self.keys) // KEY_BYTES

    def key(self, block: int) -> bytes:
        """Key of one full block."""
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
            digests, self._cursor = extras_for_block(self.extras, start, start + self.block_tokens, self._cursor)
            tail = struct.pack("<I", len(digests)) + b"".join(struct.pack("<I", len(d)) + d for d in digests)
            body = parent + head + raw[i * step : (i + 1) * step] + tail
            parent = blake2b(body, digest_size=KEY_BYTES, person=_PERSON).digest()
            out += parent


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
