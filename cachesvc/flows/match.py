"""Match: open a sequence on the longest hit of its keys, pinned in constant time."""

from __future__ import annotations

from cachesvc.flows import core as observers
from cachesvc.flows.core import TURN, Call, Core, Count
from cachesvc.flows.expected import follow, go_on_waiting, stop_following
from cachesvc.flows.fetch import fetched_blocks, reach
from cachesvc.flows.loads import back_up_copies, bring, loads_of
from cachesvc.flows.make_room import make_room
from cachesvc.flows.presence import note_hit
from cachesvc.flows.replicas import Sharing, back_up_reused, share
from cachesvc.flows.transfers import require_transfer, ticket_view, wait_for
from cachesvc.ledger.block_ledger import Hit
from cachesvc.ledger.ledger import Lease, Model, member_of
from cachesvc.ledger.sequences import OpenSequence, Prefetch
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.model.answers import GroupCells, Matched, Prefetched, Wait
from cachesvc.model.errors import Conflict, DaemonDraining, InvalidRequest, KeyMisplaced, LimitExceeded
from cachesvc.model.words import KEY_BYTES, Urgency
from cachesvc.policy.eviction import RequestHint, hinted

MOST_CLOCK_SECONDS = 1e10
"""Three hundred years: sums of ages stay numbers."""
MOST_WAITED_SECONDS = 600.0
"""Upper bound on a client-reported queueing time, seconds: all clients share the eviction model."""


def match(
    core: Core,
    call: Call,
    sequence_id: int,
    keys: bytes,
    max_blocks: int,
    sharing: Sharing | None = None,
    waited: float = 0.0,
    clock: float | None = None,
    retention: RequestHint = RequestHint.DEFAULT,
) -> Matched | Wait:
    """Open ``sequence_id`` under the lease with the longest hit of packed ``keys``.

    ``waited``: seconds since the request came to its engine, ``MOST_WAITED_SECONDS`` at most. ``clock``: by which
    eviction goes from now on. ``retention``: the engine's hint on the blocks that it uses and computes.

    With ``sharing`` it may first wait for what other replicas and storage have. Raises InvalidRequest (ragged keys, an
    id of no process), LimitExceeded, Conflict (the sequence is open), DaemonDraining.
    """
    check_request(core, call, sequence_id, keys)
    lease, model, place, index = call.lease, call.model, call.replica.place, call.model.blocks.index
    if clock is not None or not model.blocks.clock.is_own:
        _tell_time(model, clock)
    if index.taking is not None and not index.take_over():
        return TURN
    hit = find_hit(core, call, keys, max_blocks, sharing)
    if isinstance(hit, Wait):
        return hit
    sequence = OpenSequence(sequence_id, lease.id, model.id, call.replica.id, model.blocks, place, keys)
    sequence.follow_hint(retention)
    sequence.hold(hit, hinted(core.ledger.stamp(), retention, place.pools[place.lead].usable))
    lease.sequences[sequence_id] = sequence
    sequence.charge(core.ledger.key_bytes, lease.party)
    stored = 0 if sharing is None or core.storage is None else fetched_blocks(hit, sharing)
    coming = 0 if sharing is None else sharing.coming
    if sharing is not None and sharing.expectation is not None:
        sequence.wait_for(sharing.expectation)
    if not coming:  # else its caller matches again before it uses the hit
        observers.matched(core, call, sequence, hit, stored, max_blocks, min(waited, MOST_WAITED_SECONDS), clock)
        note_hit(core, model, hit.row)
        if place.window_groups and hit.device_blocks:
            looked = sequence.window_rows.items()
            back_up_copies(core, model, call.replica, [(group, row) for group, held in looked for row in held.values()])
        if core.writing.counts_reuse and hit.row != NO_ROW:
            back_up_reused(core, model, call.replica, hit.row)
    device, host = hit.device_blocks, hit.blocks - hit.device_blocks
    tables = [GroupCells(group, 0, table[:]) for group, table in enumerate(sequence.tables)] if device else ()
    computing = computing_blocks(model, keys, hit.blocks) if model.blocks.computing else 0
    return Matched(device, host, computing, tuple(tables), min(stored, host), hit.full_blocks, coming)


def check_request(core: Core, call: Call, sequence_id: int, keys: bytes) -> None:
    """Check that a sequence may be opened on these keys. Raises Conflict, InvalidRequest, LimitExceeded."""
    lease, limits = call.lease, core.limits
    if sequence_id in lease.sequences:
        raise Conflict(f"sequence {sequence_id} is open already; release it first or use another id")
    if lease.instance and member_of(sequence_id) not in lease.members.values():
        raise InvalidRequest(f"sequence {sequence_id} is of no process of this lease: ids follow on what Open answered")
    if len(lease.sequences) >= limits.sequences_per_lease:
        held, most = len(lease.sequences) + 1, limits.sequences_per_lease
        setting = "sequences_per_lease"
        raise LimitExceeded.of_setting("open sequences of this lease", held, most, setting, "release some")
    held, most = core.ledger.key_bytes.get(lease.party, 0) + len(keys), limits.key_bytes_per_process
    if held > most:
        raise LimitExceeded("bytes of keys of this process's open sequences", held, most)


def _tell_time(model: Model, clock: float | None) -> None:
    """Raises InvalidRequest for what is not a time, and where others go by the daemon's."""
    if clock is None:
        model.blocks.clock.keep_own()
    elif not model.blocks.clock.tell(require_clock(clock)):
        raise InvalidRequest(
            "clock_seconds: other requests of this model go by the daemon's time; replay another model"
        )


def require_clock(seconds: float) -> float:
    """Check a time. Raises InvalidRequest for what is not one."""
    if not 0 <= seconds <= MOST_CLOCK_SECONDS:
        raise InvalidRequest(f"clock_seconds is {seconds}; a clock counts seconds, from 0 to {MOST_CLOCK_SECONDS:.0e}")
    return seconds


def find_hit(core: Core, call: Call, keys: bytes, max_blocks: int, sharing: Sharing | None) -> Hit | Wait:
    """The longest hit of packed ``keys``. It is not pinned yet: hold it at once.

    Raises InvalidRequest, KeyMisplaced, LimitExceeded, DaemonDraining.
    """
    if core.ledger.draining:
        raise DaemonDraining("the daemon is draining and opens no new sequences; go on without the cache")
    check_keys(call.lease, keys)
    call.model.last_used = call.now
    blocks = call.model.blocks
    if sharing is not None and (still := go_on_waiting(core, call, sharing)) is not None:
        return still
    before = blocks.misplaced
    try:
        hit = blocks.find(keys, call.replica.place, max_blocks)
    except KeyMisplaced:
        core.count(Count.KEYS_MISPLACED)
        raise
    if blocks.misplaced != before:
        core.count(Count.KEYS_MISPLACED, blocks.misplaced - before)
    if sharing is None or stop_following(core, call, keys, max_blocks, sharing):
        return hit
    wait = share(core, call, keys, max_blocks, hit, sharing) if len(call.model.replicas) > 1 else None
    if wait is None and sharing.expected is not None:
        wait = follow(core, call, keys, max_blocks, hit, sharing)
    if wait is None and core.storage is not None and not sharing.coming:
        wait = reach(core, call, keys, max_blocks, hit, sharing)
    return hit if wait is None else wait


def check_keys(lease: Lease, keys: bytes) -> None:
    """Raises InvalidRequest for packed keys of a ragged length, LimitExceeded for too many."""
    if len(keys) % KEY_BYTES:
        raise InvalidRequest(f"keys has {len(keys)} bytes, which is not a multiple of {KEY_BYTES}")
    if len(keys) // KEY_BYTES > lease.blocks_per_sequence:
        most, setting = lease.blocks_per_sequence, "blocks_per_sequence"
        raise LimitExceeded.of_setting("block keys", len(keys) // KEY_BYTES, most, setting, "send fewer")


def computing_blocks(model: Model, keys: bytes, first: int) -> int:
    """Number of blocks from ``first`` on that requests are computing now. They declare keys root first, so these are
    a run, whose end is found by bisection."""
    low = first
    middle = high = len(keys) // KEY_BYTES
    while low < high:
        if keys[(middle - 1) * KEY_BYTES : middle * KEY_BYTES] in model.blocks.computing:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) >> 1
    return low - first


def prefetch(core: Core, call: Call, keys: bytes, sharing: Sharing | None = None) -> Prefetched | Wait:
    """Start loading what of ``keys`` lies on the host, in the background until a flow waits for it.

    With ``sharing`` also what other replicas have; where it must come through the host, that is waited for. Raises
    InvalidRequest, LimitExceeded (prefetches, transfers), PoolExhausted, DaemonDraining.
    """
    lease, model, replica = call.lease, call.model, call.replica
    if len(lease.prefetches) >= core.limits.prefetches_per_lease:
        raise LimitExceeded(
            "prefetches of this lease under way", len(lease.prefetches) + 1, core.limits.prefetches_per_lease
        )
    hit = find_hit(core, call, keys, 0, sharing)
    if isinstance(hit, Wait):
        begun = sharing.ticket if sharing is not None else None
        return hit if sharing is None or begun is None else Prefetched(sharing.blocks, (ticket_view(begun),))
    held = Prefetch(model.blocks, replica.place, lease.prefetches)
    held.hold(hit, core.ledger.stamp())
    try:
        loads = loads_of(core, model, replica, held.rest(), held.sealed, held.hit_blocks)
        if loads.blocked:
            return wait_for(core, loads.blocked)
        if loads.is_transfer:
            require_transfer(core, model, replica, lease.party)
        wait = make_room(core, call, loads.pages_wanted(), loads.keep)
        if wait is not None:
            return wait
        tickets = bring(core, call, held, loads, Urgency.BACKGROUND)
        return Prefetched(hit.blocks, tuple(map(ticket_view, tickets)))
    finally:
        if not held.loads:  # all is in place, or nothing comes
            held.let_go()
