"""Messages from descriptors: every field filled with what it could hold, what it must not hold, and what is real."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tests.fuzz.pools import Pools

INTEGERS = (0, 1, 2, 3, 4, 7, 8, 15, 16, 24, 31, 64, 255, 256, 4096, 4097, 65536, 2**31 - 1, 2**31, 2**32 - 1)
WIDE = (2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "a", "full", "window", "k", "v", "uint8", "device", "host", "shm-0", "shm-1", "é" * 40, "\0", "x" * 5000)
DEEPEST = 6
MANY = 300

TYPES = {FieldDescriptor.TYPE_BYTES: bytes, FieldDescriptor.TYPE_STRING: str, FieldDescriptor.TYPE_DOUBLE: float}

Maker = Callable[["Generator"], Any]


class Generator:
    """Makes messages of any type, under one random generator."""

    def __init__(self, rng: random.Random, pools: Pools) -> None:
        self.rng = rng
        self.pools = pools

    def make(self, kind: type[Message], depth: int = 0) -> Any:
        """A message of ``kind`` with some of its fields set."""
        message = kind()
        descriptor: Any = kind.DESCRIPTOR
        for one in descriptor.oneofs:
            if self.rng.random() < 0.9:
                self._set(message, self.rng.choice(one.fields), depth)
        for field in descriptor.fields:
            if field.containing_oneof is None and self.rng.random() < 0.85:
                self._set(message, field, depth)
        return message

    def _set(self, message: Any, field: FieldDescriptor, depth: int) -> None:
        if not field.is_repeated:
            if field.message_type is None:
                setattr(message, field.name, self._scalar(field))
            elif depth < DEEPEST:
                getattr(message, field.name).CopyFrom(self.make(GetMessageClass(field.message_type), depth + 1))
            return
        count = MANY if self.rng.random() < 0.01 and depth < 2 else self.rng.choice((0, 1, 1, 2, 2, 3, 5))
        values = getattr(message, field.name)
        if field.message_type is None:
            values.extend(self._scalar(field) for _ in range(count))
        elif depth < DEEPEST:
            values.extend(self.make(GetMessageClass(field.message_type), depth + 1) for _ in range(min(count, 60)))

    def _scalar(self, field: FieldDescriptor) -> Any:
        real = REAL.get(field.name)
        if real is not None and self.rng.random() < 0.85:
            value = real(self)
            if type(value) is TYPES.get(field.type, int):  # one name can stand for two types
                return value
        return self._any(field)

    def _any(self, field: FieldDescriptor) -> Any:
        rng = self.rng
        if field.type == field.TYPE_BYTES:
            return rng.randbytes(rng.choice((0, 1, 4, 15, 16, 17, 31, 32, 33, 64, 260, 4096)))
        if field.type == field.TYPE_STRING:
            return rng.choice(TEXTS)
        if field.type == field.TYPE_BOOL:
            return rng.random() < 0.5
        if field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT):
            return rng.choice(FLOATS) if rng.random() < 0.7 else rng.random()
        if field.type == field.TYPE_ENUM:
            return rng.choice((0, 1, 2, 3, 99, -1, 2**31 - 1))
        if field.type in (field.TYPE_INT32, field.TYPE_INT64, field.TYPE_SINT32, field.TYPE_SINT64):
            return rng.choice((-1, 0, 1, 2**31 - 1, -(2**31)))
        if field.type in (field.TYPE_UINT64, field.TYPE_FIXED64):
            return rng.choice(INTEGERS + WIDE)
        return rng.choice(INTEGERS)

    def disturb(self, message: Any, depth: int = 0) -> None:
        """Change one or two fields of a message that made sense, at any depth."""
        fields = [field for field, _ in message.ListFields()] or list(message.DESCRIPTOR.fields)
        if not fields:
            return
        for _ in range(self.rng.choice((1, 1, 2))):
            field = self.rng.choice(fields if self.rng.random() < 0.8 else list(message.DESCRIPTOR.fields))
            inner = getattr(message, field.name)
            if field.message_type is not None and not field.is_repeated and self.rng.random() < 0.9:
                self.disturb(inner, depth + 1)
            elif field.is_repeated and len(inner) and self.rng.random() < 0.9:
                self._disturb_list(inner, field, depth)
            else:
                message.ClearField(field.name)
                self._set(message, field, depth + 1)

    def _disturb_list(self, values: Any, field: FieldDescriptor, depth: int) -> None:
        at = self.rng.randrange(len(values))
        kind = self.rng.randrange(4)
        if kind == 0:
            del values[at]
        elif kind == 1:
            values.extend([values[at]])
        elif field.message_type is not None:
            self.disturb(values[at], depth + 1)
        else:
            values[at] = self._scalar(field)

    def page_list(self) -> bytes:
        """Page ids of the stock or small ones; ragged at times."""
        lease = self.rng.choice(self.pools.leases) if self.pools.leases else None
        stock = [page for group in (lease.stock if lease else []) for page, _ in group]
        count = self.rng.randrange(4)
        pages = [
            self.rng.choice(stock)
            if stock and self.rng.random() < 0.7
            else self.rng.choice((0, 1, 2, 5, 40, -1, 10**6))
            for _ in range(count)
        ]
        return struct.pack(f"<{count}i", *pages) + (b"\1" if self.rng.random() < 0.05 else b"")

    def id_list(self) -> bytes:
        """Sequences of a column; ragged at times."""
        count = self.rng.randrange(4)
        ids = struct.pack(f"<{count}Q", *(self.pools.sequence_id() for _ in range(count)))
        return ids + (b"\1" if self.rng.random() < 0.05 else b"")

    def number_list(self, code: str) -> bytes:
        """Numbers of a column."""
        count = self.rng.randrange(4)
        return struct.pack(f"<{count}{code}", *(self.rng.choice((0, 1, 1, 2, 5, 2**32 - 1)) for _ in range(count)))

    def generation_list(self) -> bytes:
        """Small generations."""
        count = self.rng.randrange(4)
        return struct.pack(f"<{count}I", *(self.rng.choice((0, 1, 2, 3, 2**32 - 1)) for _ in range(count)))


REAL: dict[str, Maker] = {
    "lease_id": lambda g: g.pools.lease_id(),
    "sequence_id": lambda g: g.pools.sequence_id(),
    "keys": lambda g: g.pools.keys(),
    "key": lambda g: g.pools.keys()[-32:],
    "request_id": lambda g: g.rng.randrange(200),
    "model_id": lambda g: g.rng.choice([*g.pools.models, 0, 99]),
    "namespace": lambda g: g.rng.choice([*g.pools.models.values(), b""]),
    "replica": lambda g: g.rng.choice((0, 0, 0, 1, 2)),
    "rank": lambda g: g.rng.choice((0, 0, 0, 1, 64)),
    "process_token": lambda g: g.rng.choice(g.pools.tokens),
    "tickets": lambda g: g.rng.choice(g.pools.tickets) + g.rng.choice((0, 0, 0, 1)),
    "blocks": lambda g: g.rng.randrange(30),
    "first_block": lambda g: g.rng.randrange(12),
    "max_blocks": lambda g: g.rng.choice((0, 0, 1, 5, 24)),
    "pages": lambda g: g.page_list(),
    "generations": lambda g: g.generation_list(),
    "group": lambda g: g.rng.choice((0, 0, 0, 1, 2)),
    "grow_sequences": lambda g: g.id_list(),
    "grow_counts": lambda g: g.number_list("I"),
    "publish_sequences": lambda g: g.id_list(),
    "publish_first": lambda g: g.number_list("I"),
    "publish_counts": lambda g: g.number_list("I"),
    "publish_keys": lambda g: g.pools.keys(),
    "recycle_sequences": lambda g: g.id_list(),
    "recycle_tokens": lambda g: g.number_list("Q"),
    "release_sequences": lambda g: g.id_list(),
    "computed_tokens": lambda g: g.rng.randrange(0, 300),
    "wait_ms": lambda g: g.rng.choice((0, 0, 1, 3)),
    "limit": lambda g: g.rng.choice((0, 1, 5, 5000)),
    "depth": lambda g: g.rng.choice((0, 1, 3, 2**32 - 1)),
    "tier": lambda g: g.rng.choice(("device", "host", "storage")),
    "devices": lambda g: g.rng.choice(g.pools.devices),
    "stock_pages": lambda g: g.rng.randrange(6),
    "block_tokens": lambda g: g.rng.choice((1, 4, 16)),
    "ranks": lambda g: g.rng.choice((1, 1, 2, 3)),
    "layer": lambda g: g.rng.randrange(4),
    "dtype": lambda g: g.rng.choice(("uint8", "float16", "float32")),
    "page_shape": lambda g: g.rng.choice((1, 2, 4, 16, 64)),
    "window_tokens": lambda g: g.rng.choice((1, 8, 16, 40)),
    "name": lambda g: g.rng.choice(("full", "window", "k", "v")),
    "model": lambda g: g.rng.choice(("model@1", "other@1", "m")),
    "tenant_salt": lambda g: g.rng.choice((b"", b"a", b"b")),
    "instance_id": lambda g: g.rng.choice(("", "a", "b")),
    "reserved_pages": lambda g: g.rng.choice((0, 0, 0, 1)),
    "pause_write_backs_ms": lambda g: g.rng.choice((0, 1, 5)),
}


def mutate(rng: random.Random, raw: bytes) -> bytes:
    """``raw`` with bits flipped, bytes cut out, doubled or moved; what a broken or hostile client would send."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at : at + rng.randrange(1, 9)]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 3:
            data[at:at] = data[at : at + rng.randrange(1, 40)]
        elif at < len(data):
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
    return bytes(data)
