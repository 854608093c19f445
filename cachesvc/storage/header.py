"""An object's header: 128 bytes that name it whole, and by which it is told from anything else.

    0    magic "cskvobj" and format    8     48   layout id            8     96   xxh3_128 of the payload   16
    8    group, rank, ranks, 0      2 each   56   block key           32     112  xxh3_128 of all before    16
    16   namespace                    32     88   payload bytes        8

The checksums catch accidents: torn writes, late ones into memory that is others' by now, decay. They catch no forger;
whoever may write where objects lie is trusted with them (SECURITY.md).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from cachesvc.model.errors import Unavailable
from cachesvc.storage.seam import ObjectName, Outcome

HEADER_BYTES = 128
MAGIC = b"cskvobj\x01"
_FIELDS = struct.Struct("<8s4H32s8s32sQ")
_DIGEST_AT = HEADER_BYTES - 16

Digest = Callable[[Sequence[memoryview | bytes]], bytes]


def require_digest() -> Digest:
    """xxh3_128 of some pieces one after another, outside of the GIL. Raises Unavailable where it is not installed."""
    try:
        import xxhash
    except ImportError as missing:
        raise Unavailable(
            "storage needs the package xxhash; install cachesvc[server] or cachesvc[storage]"
        ) from missing

    def digest(pieces: Sequence[memoryview | bytes]) -> bytes:
        if len(pieces) == 1:
            whole: bytes = xxhash.xxh3_128_digest(pieces[0])
            return whole
        state = xxhash.xxh3_128()
        for piece in pieces:
            state.update(piece)
        parts: bytes = state.digest()
        return parts

    return digest


def identity(name: ObjectName, payload_bytes: int) -> bytes:
    """The first 96 bytes: all but the checksums."""
    group, rank, ranks = name.part
    scope = name.scope
    return _FIELDS.pack(MAGIC, group, rank, ranks, 0, scope.namespace, scope.layout, name.key, payload_bytes)


def write_header(
    digest: Digest, name: ObjectName, head: memoryview, pages: Sequence[memoryview], payload_bytes: int
) -> None:
    """Fill ``head``: what is behind the header is zeroed. Reads the payload."""
    first = identity(name, payload_bytes) + digest(pages)
    head[:HEADER_BYTES] = first + digest((first,))
    if len(head) > HEADER_BYTES:
        head[HEADER_BYTES:] = bytes(len(head) - HEADER_BYTES)


def check_content(digest: Digest, head_bytes: int, name: ObjectName, content: memoryview) -> bool:
    """True where ``content`` is the object of that name: a header in its first ``head_bytes``, then the payload, and
    whatever behind it."""
    if len(content) < head_bytes:
        return False
    _, _, _, _, _, _, _, _, payload_bytes = _FIELDS.unpack_from(content)
    payload = content[head_bytes : head_bytes + payload_bytes]
    return len(payload) == payload_bytes and check(digest, name, content, [payload], payload_bytes) is Outcome.OK


def check(
    digest: Digest, name: ObjectName, head: memoryview, pages: Sequence[memoryview], payload_bytes: int
) -> Outcome:
    """OK where ``pages`` hold the very object that was asked for, else WRONG. Reads the payload only where the header
    is right."""
    header = bytes(head[:HEADER_BYTES])
    if header[: _FIELDS.size] != identity(name, payload_bytes):
        return Outcome.WRONG
    if digest((header[:_DIGEST_AT],)) != header[_DIGEST_AT:]:
        return Outcome.WRONG
    return Outcome.OK if digest(pages) == header[_FIELDS.size : _DIGEST_AT] else Outcome.WRONG
