"""Release: end a sequence. What it shares is unpinned, what is its own goes back to the pool."""

from __future__ import annotations

from collections.abc import Container

from cachesvc.flows.context.call import Call, no_sequence
from cachesvc.flows.context.core import Core
from cachesvc.flows.context.turns import TURN
from cachesvc.flows.storage.uses import note_end
from cachesvc.flows.transfer.late_states import back_up_copies
from cachesvc.flows.transfer.low_watermark import look_ahead
from cachesvc.ledger.index.tier_copies import NO_ROW
from cachesvc.model.answers import Wait
from cachesvc.model.columns import Releases
from cachesvc.model.requests import Ended
from cachesvc.policy.hints import RequestHint


def release_many(
    core: Core, call: Call, releases: Releases, entries: range, told: list[int], held: Container[int] = ()
) -> None:
    """``release`` for ``entries``, in order. ``told`` gets the pages of each; it is short where there is no such
    sequence, it is among ``held``, or it takes more turns than one."""
    for entry in entries:
        number, tokens = releases.sequences[entry], releases.output_tokens
        if number not in call.lease.sequences or number in held:
            return
        freed = release(core, call, number, Ended(tokens[entry]) if tokens else None)
        if isinstance(freed, Wait):
            return
        told.append(freed)


def ended(call: Call, tokens: int | None, ago: float, clock: float | None) -> Ended:
    """Report of an engine on a request that ended ``ago`` seconds ago, or at ``clock`` where it gives the time."""
    now = call.model.blocks.clock
    return Ended(tokens, now.seconds - ago if clock is None or not now.is_told else clock)


def release(core: Core, call: Call, sequence_id: int, end: Ended | None = None) -> int | Wait:
    """End a sequence; returns how many device pages came back. Raises NotFound (also the second time). ``end``: how its
    request did, for the eviction policy.

    One that takes more turns than one is gone for other calls from the first on; a call that is given up half-way can
    be sent again.
    """
    sequence = call.lease.sequences.get(sequence_id)
    if sequence is None:
        raise no_sequence(sequence_id)
    if end is not None:
        sequence.tell_end(end)
    if sequence.is_open:
        note_end(core, call.model, sequence.anchor)
        if sequence.window_rows and sequence.anchor != NO_ROW and sequence.retention != RequestHint.ONCE:
            ends = [(group, sequence.windows.last_rows(group, sequence.anchor)) for group in sequence.window_rows]
            back_up_copies(core, call.model, call.replica, [(group, row) for group, rows in ends for row in rows])
    if not sequence.end_part(core.turns.pages):
        return TURN
    del call.lease.sequences[sequence_id]
    look_ahead(core, call.model, call.replica)
    return sequence.freed
