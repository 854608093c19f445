"""Release: end a sequence. What it shares is unpinned, what is its own goes back to the pool."""

from __future__ import annotations

from collections.abc import Container, Sequence

from cachesvc.flows.call import Call
from cachesvc.flows.core import Core


def release_many(
    core: Core, call: Call, sequences: Sequence[int], entries: range, told: list[int], held: Container[int] = ()
) -> None:
    """``release`` for ``entries``, in order. ``told`` gets the pages of each; it is short where there is no such
    sequence, or it is among ``held``."""
    for entry in entries:
        number = sequences[entry]
        if number not in call.lease.sequences or number in held:
            return
        told.append(release(core, call, number))


def release(_: Core, call: Call, sequence_id: int) -> int:
    """End a sequence; returns how many device pages came back. Raises NotFound (also the second time)."""
    freed = call.known_sequence(sequence_id).end()
    del call.lease.sequences[sequence_id]
    return freed
