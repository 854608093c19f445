"""A call of an engine with everything looked up: its lease, model and replica, and its time."""

from __future__ import annotations

from typing import NamedTuple

from cachesvc.ledger.leases import Lease
from cachesvc.ledger.ledger import Ledger, Model, Replica
from cachesvc.ledger.sequences import Sequence
from cachesvc.model.errors import Conflict, LoadFailed, NotFound


class Call(NamedTuple):
    """Made by ``resolve`` for each run of a flow; flows look nothing up again. ``now``: seconds, monotonic."""

    lease: Lease
    model: Model
    replica: Replica
    now: float

    def known_sequence(self, sequence_id: int) -> Sequence:
        """A sequence of the lease, failed or not. Raises NotFound."""
        sequence = self.lease.sequences.get(sequence_id)
        if sequence is None or not sequence.is_open:
            raise NotFound("sequence", sequence_id, "it was released, or never matched under this lease")
        return sequence

    def sequence(self, sequence_id: int) -> Sequence:
        """A sequence of the lease that may go on. Raises NotFound, LoadFailed."""
        sequence = self.known_sequence(sequence_id)
        if sequence.failed:
            raise LoadFailed(f"sequence {sequence_id}: {sequence.failed}; release it, match again and recompute")
        return sequence


def resolve(ledger: Ledger, lease_id: str, now: float) -> Call:
    """Look a call up; it is a sign of life. Raises LeaseLost for a lease that ended, NotFound for one that never was,
    Unavailable for a model that is out of service.

    A flow that waited is run with a new Call: its lease may be lost by then.
    """
    lease = ledger.lease(lease_id)
    lease.heard(now)
    model = ledger.models[lease.model]
    if model.suspect:
        model.require_trusted()
    return Call(lease, model, model.replica(lease.replica), now)


def require_still(sequence: Sequence) -> None:
    """Raises Conflict while a sequence is on its way out or in."""
    if sequence.swap_ticket:
        raise Conflict(f"sequence {sequence.id} is being swapped by ticket {sequence.swap_ticket}; wait for it")


def require_on_device(sequence: Sequence) -> None:
    """Raises Conflict while a sequence is swapped out or on its way."""
    if sequence.swap_ticket:
        require_still(sequence)
    if sequence.swapped_out:
        raise Conflict(f"sequence {sequence.id} is swapped out; swap it in first")
