"""gRPC status of each kind of failure, and the metadata key that names the kind itself."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from kvcache.v1.cache_pb2 import ErrorFact, OperationError

from cachesvc.model.errors import CacheError, ErrorCode

ERROR_METADATA_KEY = "kv-error-code"
ERROR_FACTS_METADATA_KEY = "kv-error-facts-bin"
"""Metadata of a refused call: the kind of failure, and its facts as a serialized ``OperationError``."""

GRPC_CODES: dict[ErrorCode, grpc.StatusCode] = {
    ErrorCode.KEY_MISPLACED: grpc.StatusCode.INVALID_ARGUMENT,  # a status without a name is the later of two
    ErrorCode.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorCode.CONFLICT: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.LEASE_LOST: grpc.StatusCode.ABORTED,
    ErrorCode.NOT_OWNED: grpc.StatusCode.PERMISSION_DENIED,
    ErrorCode.LOAD_FAILED: grpc.StatusCode.DATA_LOSS,
    ErrorCode.TOO_SLOW: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.GAP: grpc.StatusCode.OUT_OF_RANGE,
    ErrorCode.LIMIT: grpc.StatusCode.OUT_OF_RANGE,
    ErrorCode.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorCode.DRAINING: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorCode.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorCode.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    ErrorCode.QUOTA_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
}

AUTHORIZATION_METADATA_KEY = "authorization"
BEARER = "Bearer "
PROCESS_METADATA_KEY = "kv-process-token-bin"
"""Proof of a call's caller: a token of the tokens' file, or what the life socket gave to its process."""

MAX_METADATA_BYTES = 16 << 10
MAX_STREAMS = 1024
"""Calls at a time on one connection."""

MAX_MESSAGE_BYTES = 8 << 20
"""Largest message either way: keys of 65,536 blocks are 2 MiB."""

LIFE_SUFFIX = ".life"
LIFE_GREETING = b"KVL1"
LIFE_BUSY = b"NO: the daemon is busy; ask again"
"""The life socket beside the gRPC socket: greeting, 16-byte process token, epoch as little-endian u64."""


MAX_FACT_CHARACTERS = 256
"""Longer texts are cut: metadata of a call is limited to 16 KiB."""

NUMBERS = range(-(1 << 63), 1 << 63)
"""Range of an ``int64`` field; larger numbers stay in the sentence alone."""


def refusal(error: CacheError) -> OperationError:
    """Convert an error to the message that a step or a lane answers with."""
    facts = []
    for name, value in error.facts().items():
        if isinstance(value, str):
            facts.append(ErrorFact(name=name, text=value[:MAX_FACT_CHARACTERS]))
        elif value in NUMBERS:
            facts.append(ErrorFact(name=name, number=value))
    return OperationError(code=error.code.value, message=str(error), facts=facts)


def facts_of(facts: Iterable[ErrorFact]) -> dict[str, int | str]:
    return {fact.name: fact.text if fact.WhichOneof("value") == "text" else fact.number for fact in facts}


def status_metadata(error: OperationError) -> tuple[tuple[str, str | bytes], ...]:
    """Return the trailing metadata of a refused gRPC call."""
    named = (ERROR_METADATA_KEY, error.code)
    if not error.facts:
        return (named,)
    return named, (ERROR_FACTS_METADATA_KEY, OperationError(facts=error.facts).SerializeToString())
