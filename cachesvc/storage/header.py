"""An object's header: 256 bytes that name it whole, and that distinguish it from anything else.

    0    magic "cskvobj" and format    8     56   block key            32    144  xxh3_128 of the payload   16
    8    group, rank, ranks, 0      2 each   88   parent's key         32    160  xxh3_128 of all before    16
    16   namespace                    32     120  payload bytes         8    176  zero
    48   layout id                     8     128  zero                 16

A key stands for all blocks before it, and its parent is a part of what it names: an object that lies below another
block than the reader says is not the one that was asked for. A root block's parent is zero. Format 1 had no parent:
what is left of it counts as missing. So does what a newer release has written, which is not removed: that release may
be in use beside this one, or come back.

The checksums catch accidents: torn writes, late ones into memory that is others' by now, decay. They catch no forger: a
process that may write there is trusted (SECURITY.md).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from cachesvc.model.errors import Unavailable
from cachesvc.model.keys import KEY_BYTES
from cachesvc.storage.seam import Item, ObjectName, Outcome

HEADER_BYTES = 256
MAGIC = b"cskvobj\x02"
_FIELDS = struct.Struct("<8s4H32s8s32s32sQ16x")
_KEY, _PARENT = slice(56, 88), slice(88, 120)
_DIGEST_AT, _END = _FIELDS.size + 16, _FIELDS.size + 32
LAST_FORMAT = 15
"""Highest number of a format that is taken for one."""
ANY_PARENT = None
"""Parent of a reader that knows of none: any will do."""

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


def identity(name: ObjectName, parent: bytes, payload_bytes: int) -> bytes:
    """All but the checksums."""
    group, rank, ranks = name.part
    scope = name.scope
    return _FIELDS.pack(MAGIC, group, rank, ranks, 0, scope.namespace, scope.layout, name.key, parent, payload_bytes)


def write_header(digest: Digest, item: Item) -> None:
    """Fill the head of an item: what is behind the header is zeroed. Reads the payload."""
    first = identity(item.name, item.parent, item.payload_bytes) + digest(item.pages)
    item.head[:_END] = first + digest((first,))
    item.head[_END:] = bytes(len(item.head) - _END)


def parent_in(header: bytes, key: bytes) -> bytes | None:
    """The parent that the header of the block ``key`` names, empty for none; None where it is no header of that block.
    A hint: no checksum is compared."""
    if header[:8] != MAGIC or header[_KEY] != key or len(header) < _PARENT.stop:
        return None
    parent = header[_PARENT]
    return b"" if parent == bytes(KEY_BYTES) else parent


def is_newer(content: bytes | memoryview) -> bool:
    """True where an object, or its first 8 bytes, is of a format that a newer release writes."""
    return _is_of_another_format(content) and content[7] > MAGIC[7]


def _is_of_another_format(content: bytes | memoryview) -> bool:
    """True for a format that some release has written, or will; other bytes there are damage."""
    if len(content) < len(MAGIC) or content[:7] != MAGIC[:7]:
        return False
    return content[7] != MAGIC[7] and 0 < content[7] <= LAST_FORMAT


def check_content(digest: Digest, head_bytes: int, name: ObjectName, content: memoryview) -> Outcome:
    """OK where ``content`` is the object of that name, below whatever block: a header in its first ``head_bytes``,
    then the payload, and whatever behind it. MISS where it is of another format, else WRONG."""
    if _is_of_another_format(content):
        return Outcome.MISS
    if len(content) < head_bytes:
        return Outcome.WRONG
    payload_bytes: int = _FIELDS.unpack_from(content)[-1]
    payload = content[head_bytes : head_bytes + payload_bytes]
    if len(payload) != payload_bytes:
        return Outcome.WRONG
    return check(digest, Item(name, content, (payload,)), ANY_PARENT)


def check(digest: Digest, item: Item, parent: bytes | None) -> Outcome:
    """OK where an item holds the very object that was asked for, below ``parent``; MISPLACED where it is below another
    block, MISS where it is of another format, else WRONG. Reads the payload only where the header is right."""
    header = bytes(item.head[:_END])
    if _is_of_another_format(header):
        return Outcome.MISS
    theirs = header[_PARENT]
    if header[: _FIELDS.size] != identity(item.name, theirs, item.payload_bytes):
        return Outcome.WRONG
    if digest((header[:_DIGEST_AT],)) != header[_DIGEST_AT:]:
        return Outcome.WRONG
    if parent is not ANY_PARENT and theirs != parent.ljust(KEY_BYTES, b"\0"):
        return Outcome.MISPLACED
    return Outcome.OK if digest(item.pages) == header[_FIELDS.size : _DIGEST_AT] else Outcome.WRONG
