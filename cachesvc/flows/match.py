"""Match: open a sequence on the longest hit of its keys, pinned in constant time."""

from __future__ import annotations

from cachesvc.flows.core import NO_MODEL, TURN, Call, Core, Count
from cachesvc.flows.expected import follow, go_on_waiting, stop_following
from cachesvc.flows.fetch import fetched_blocks, reach
from cachesvc.flows.loads import Sharing, back_up_copies, back_up_reused, bring, loads_of, share
from cachesvc.flows.make_room import make_room
from cachesvc.flows.stored import note_hit
from cachesvc.flows.transfers import require_transfer, ticket_view, wait_for
from cachesvc.ledger.block_ledger import Hit
from cachesvc.ledger.ledger import Lease, Model, member_of
from cachesvc.ledger.retention import PromptPath, Request
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
GHOSTS_LOOKED = 1024
"""Blocks of a prompt that have left the cache and are looked up, the deepest of them."""


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
        _note_match(core, call, sequence, hit, stored, max_blocks, min(waited, MOST_WAITED_SECONDS), clock)
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


def _note_match(
    core: Core,
    call: Call,
    sequence: OpenSequence,
    hit: Hit,
    stored: int,
    max_blocks: int,
    waited: float,
    clock: float | None,
) -> None:
    """A Match has opened ``sequence`` on a hit, ``stored`` blocks of which came from storage. ``max_blocks``: its
    limit, 0 for none. ``waited``: seconds that its request had been queued. ``clock``: its engine's time, if known."""
    model, replica, keys = call.model, call.replica, bytes(sequence.keys)
    blocks, counters = len(keys) // KEY_BYTES, core.counters
    for name, amount in ((Count.MATCH_REQUESTS, 1), (Count.MATCH_BLOCKS, blocks)):
        counters[name._value_] = counters.get(name._value_, 0) + amount
    from_host = hit.blocks - hit.device_blocks
    passed_on = max(0, stored - from_host)  # a prefix in pieces: these are on the device by now
    model.hit_blocks["device"] += hit.device_blocks - passed_on
    model.hit_blocks["host"] += from_host - (stored - passed_on)
    model.hit_blocks["storage"] += stored
    for group, shorter in hit.lost:
        model.lost_blocks["state" if group in model.layout.state_groups else "window"] += shorter
    came = call.now - waited if clock is None else clock
    sequence.remember(model.recent.add(came, keys, core.limits.recent_blocks // len(core.ledger.models)))
    asked = min(blocks, max_blocks) if max_blocks else blocks
    has_windows = bool(replica.place.window_groups)
    model.reuse.matched(model.blocks.index, keys, asked, hit.blocks, has_windows=has_windows)
    if replica.shadow is not None and core.eviction.learns:
        replica.shadow.matched(keys, asked, hit.device_blocks)
    if model.blocks.chooser is not None:
        _follow(core, call, sequence, hit.blocks, waited)
    if model.blocks.retention is not None:
        _value_positions(core, call, keys, hit)


def _value_positions(core: Core, call: Call, keys: bytes, hit: Hit) -> None:
    """Have the eviction policy learn where requests continue, of those blocks too that have left the cache."""
    blocks, full = call.model.blocks, hit.full_blocks
    if blocks.retention is not None:

        def key(position: int) -> bytes:
            return keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]

        asked = len(keys) // KEY_BYTES
        known = call.model.reuse.known(blocks.index, keys, hit.blocks, asked)[1]
        beyond = map(key, range(known - 1, max(full, known - GHOSTS_LOOKED) - 1, -1))
        blocks.retention.arrived(blocks.index.rows.get(key(full - 1), NO_ROW) if full else NO_ROW, asked, beyond)
        if (lesson := blocks.retention.rule.lesson()) is not None:
            core.later(NO_MODEL, lesson)


def _follow(core: Core, call: Call, sequence: OpenSequence, hit_blocks: int, waited: float) -> None:
    """Have the eviction policy follow the request from now on: blocks that it uses are its own."""
    model, keys = call.model, bytes(sequence.keys)
    blocks = model.blocks
    if blocks.chooser is not None:
        resident, known = model.reuse.known(blocks.index, keys, hit_blocks, len(keys) // KEY_BYTES)
        path = PromptPath(blocks.index, keys, known, resident)
        sequence.follow(Request(blocks.chooser, blocks.index, path, blocks.clock.seconds, waited))
        if blocks.index.taking is not None:
            core.later(NO_MODEL, blocks.index.take_over)
        if (lesson := blocks.chooser.lesson()) is not None:
            core.later(NO_MODEL, lesson)


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
