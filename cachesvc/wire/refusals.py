"""Errors as messages and back: an ``OperationError``, and what a gRPC status carries of it in its trailing metadata."""

from __future__ import annotations

from collections.abc import Iterable

from kvcache.v1.cache_pb2 import ErrorFact, OperationError

from cachesvc.model.errors import CacheError
from cachesvc.wire.status import ERROR_FACTS_METADATA_KEY, ERROR_METADATA_KEY

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
    """Return facts by name."""
    return {fact.name: fact.text if fact.WhichOneof("value") == "text" else fact.number for fact in facts}


def status_metadata(error: OperationError) -> tuple[tuple[str, str | bytes], ...]:
    """Return the trailing metadata of a refused gRPC call."""
    named = (ERROR_METADATA_KEY, error.code)
    if not error.facts:
        return (named,)
    return named, (ERROR_FACTS_METADATA_KEY, OperationError(facts=error.facts).SerializeToString())
