"""Release: end a sequence. What it shares is unpinned, what is its own goes back to the pool."""

from __future__ import annotations

from cachesvc.flows.call import Call
from cachesvc.flows.core import Core
from cachesvc.flows.turns import TURN
from cachesvc.model.answers import Wait
from cachesvc.model.errors import NotFound


def release(core: Core, call: Call, sequence_id: int) -> int | Wait:
    """End a sequence; returns how many device pages came back. Raises NotFound (also the second time).

    One that takes more turns than one is gone for other calls from the first on; a call that is given up half-way can
    be sent again.
    """
    sequence = call.lease.sequences.get(sequence_id)
    if sequence is None:
        raise NotFound("sequence", sequence_id, "it was released, or never matched under this lease")
    if not sequence.end_part(core.turns.pages):
        return TURN
    del call.lease.sequences[sequence_id]
    return sequence.freed
