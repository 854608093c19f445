"""Release: end a sequence. What it shares is unpinned, what is its own goes back to the pool."""

from __future__ import annotations

from cachesvc.flows.call import Call
from cachesvc.flows.core import Core


def release(_: Core, call: Call, sequence_id: int) -> int:
    """End a sequence; returns how many device pages came back. Raises NotFound (also the second time)."""
    freed = call.known_sequence(sequence_id).end()
    del call.lease.sequences[sequence_id]
    return freed
