"""Hints on the use of a request's blocks, which eviction reads."""

from __future__ import annotations

from enum import Enum

from kvcache.v1 import cache_pb2


class Retention(Enum):
    """Expectation of an engine for the blocks that a request uses and computes. A hint moves blocks within the order of
    their own model; a false one costs only the model's own hits.

    ``ONCE``: they will not be asked for again (evaluation, batch jobs). They go before all others, and are not
    copied to the host when they are sealed. ``KEEP``: they will come back (a conversation's next turn, a tool's
    answer). They stay for one more turn of the pool.
    """

    DEFAULT = "default"
    ONCE = "once"
    KEEP = "keep"

    @property
    def number(self) -> cache_pb2.Retention.ValueType:
        """Its value in a message."""
        return _NUMBERS[self]


_NUMBERS = {
    Retention.DEFAULT: cache_pb2.RETENTION_UNSPECIFIED,
    Retention.ONCE: cache_pb2.RETENTION_ONCE,
    Retention.KEEP: cache_pb2.RETENTION_KEEP,
}
