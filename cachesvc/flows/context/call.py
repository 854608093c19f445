"""A call of an engine with everything looked up: its lease, model and replica, and its time."""

from __future__ import annotations

from typing import NamedTuple

from cachesvc.ledger.leases import Lease, LeaseState
from cachesvc.ledger.ledger import Ledger, Model, Replica
from cachesvc.ledger.sequence_state import AWAY, ENDED, FAILED, LEAVING, ON_DEVICE, RETURNING
from cachesvc.ledger.sequences import OpenSequence
from cachesvc.model.errors import CacheError, Conflict, LoadFailed, NotFound


class Call(NamedTuple):
    """Made once when a call comes, and anew for each further run of its flow: its lease may be lost by then. Flows look
    nothing up again. ``now``: seconds, monotonic."""

    lease: Lease
    model: Model
    replica: Replica
    now: float

    def known_sequence(self, sequence_id: int) -> OpenSequence:
        """A sequence of the lease, failed or not. Raises NotFound."""
        sequence = self.lease.sequences.get(sequence_id)
        if sequence is None or sequence.state is ENDED:
            raise no_sequence(sequence_id)
        return sequence

    def sequence(self, sequence_id: int) -> OpenSequence:
        """A sequence of the lease that may go on. Raises NotFound, LoadFailed."""
        sequence = self.known_sequence(sequence_id)
        if sequence.state is FAILED:
            raise refusal_of(sequence)
        return sequence


def call_of(ledger: Ledger, lease: Lease, now: float) -> Call:
    """The call of a lease. Raises LeaseLost for a lease that ended, Unavailable for a model that is out of service,
    NotFound for a replica whose memory is gone."""
    if lease.state is not LeaseState.LIVE:
        lease = ledger.lease(lease.id)
    model = ledger.models[lease.model]
    if model.suspect:
        model.require_trusted()
    for replica in model.replicas:
        if replica.id == lease.replica:
            return Call(lease, model, replica, now)
    return Call(lease, model, model.replica(lease.replica), now)


def resolve(ledger: Ledger, lease_id: str, now: float) -> Call:
    """The call of a lease by its id, which is a sign of life: for callers without a dispatcher, as simulations are.

    Raises as ``call_of``, and NotFound for a lease that never was."""
    lease = ledger.lease(lease_id)
    lease.heard(now)
    return call_of(ledger, lease, now)


def require_active(sequence: OpenSequence) -> None:
    """Raises Conflict for a sequence that is swapped out or on its way, LoadFailed for one that can only be released.
    One whose hit is being loaded passes: it may grow."""
    if sequence.state not in ON_DEVICE:
        raise refusal_of(sequence)


def no_sequence(number: int) -> NotFound:
    """Error for a sequence that the lease does not have."""
    return NotFound("sequence", number, "it was released, or never matched under this lease")


def refusal_of(sequence: OpenSequence) -> CacheError:
    """Error for what cannot be done with a sequence in its state."""
    number, state = sequence.id, sequence.state
    if state is FAILED:
        return LoadFailed(f"sequence {number}: {sequence.failed}; release it, match again and recompute")
    if state is LEAVING or state is RETURNING:
        return Conflict(f"sequence {number} is being swapped by ticket {sequence.swap_ticket}; wait for it")
    if state is AWAY:
        return Conflict(f"sequence {number} is swapped out; swap it in first")
    if state is ENDED:
        return no_sequence(number)
    return Conflict(f"sequence {number} is on the device already")
