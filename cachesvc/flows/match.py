"""Match: open a sequence on the longest hit of its keys, pinned in constant time."""

from __future__ import annotations

from cachesvc.flows.backup import back_up
from cachesvc.flows.call import Call
from cachesvc.flows.core import Core, cells
from cachesvc.flows.peers import Sharing, share
from cachesvc.ledger.blocks import Hit, hit_window_blocks, window_positions
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.place import NO_ROW, Place
from cachesvc.ledger.sequences import Sequence
from cachesvc.model.answers import GroupCells, Matched, Wait
from cachesvc.model.errors import Conflict, DaemonDraining, InvalidRequest, LimitExceeded
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.words import NO_PAGE


def match(
    core: Core, call: Call, sequence_id: int, keys: bytes, max_blocks: int, sharing: Sharing | None = None
) -> Matched | Wait:
    """Open ``sequence_id`` under the lease with the longest hit of packed ``keys``.

    With ``sharing`` it may first wait for what other replicas have. Raises InvalidRequest (ragged keys), LimitExceeded,
    Conflict (the sequence is open), DaemonDraining.
    """
    opened = open_on_hit(core, call, sequence_id, keys, max_blocks, sharing)
    if isinstance(opened, Wait):
        return opened
    hit, tables = opened
    model, replica = call.model, call.replica
    model.hit_blocks["device"] += hit.device_blocks
    model.hit_blocks["host"] += hit.blocks - hit.device_blocks
    core.count("match_requests")
    asked = len(keys) // KEY_BYTES
    core.count("match_blocks", asked)
    asked = min(asked, max_blocks) if max_blocks else asked
    has_windows = bool(replica.place.window_groups)
    model.reuse.matched(model.blocks.index, keys, asked, hit.blocks, has_windows=has_windows)
    if core.writing.counts_reuse and hit.row != NO_ROW:
        _count_reuse(core, model, replica, hit.row)
    return Matched(hit.device_blocks, hit.blocks - hit.device_blocks, _computing(model, keys, hit.blocks), tables)


def open_on_hit(
    core: Core, call: Call, sequence_id: int, keys: bytes, max_blocks: int, sharing: Sharing | None
) -> tuple[Hit, tuple[GroupCells, ...]] | Wait:
    """``match`` without counting it as a use of the blocks."""
    lease, model, replica = call.lease, call.model, call.replica
    if core.ledger.draining:
        raise DaemonDraining("the daemon is draining and opens no new sequences; go on without the cache")
    check_keys(core, keys)
    if sequence_id in lease.sequences:
        raise Conflict(f"sequence {sequence_id} is open already; release it first or use another id")
    if len(lease.sequences) >= core.limits.sequences_per_lease:
        raise LimitExceeded("open sequences of this lease", len(lease.sequences) + 1, core.limits.sequences_per_lease)
    model.last_used = call.now
    place = replica.place
    hit = model.blocks.find(keys, place, max_blocks)
    if sharing is not None:
        wait = share(core, model, replica, keys, max_blocks, hit, sharing)
        if wait is not None:
            return wait
    sequence = Sequence(
        id=sequence_id,
        lease=lease.id,
        model=model.id,
        replica=replica.id,
        keys=bytearray(keys),
        tables=[[] for _ in model.layout.groups],
        own=[set() for _ in model.layout.groups],
        cursors={
            group: max(model.layout.sink_blocks(group), hit.blocks - hit_window_blocks(model.layout, group))
            for group in model.layout.window_groups
        },
    )
    pin_hit(core, model, place, sequence, hit)
    lease.sequences[sequence_id] = sequence
    return hit, _in_place(model, place, sequence, hit)


def check_keys(core: Core, keys: bytes) -> None:
    """Raises InvalidRequest for packed keys of a ragged length, LimitExceeded for too many."""
    if len(keys) % KEY_BYTES:
        raise InvalidRequest(f"keys has {len(keys)} bytes, which is no multiple of {KEY_BYTES}")
    if len(keys) // KEY_BYTES > core.limits.blocks_per_sequence:
        raise LimitExceeded("block keys", len(keys) // KEY_BYTES, core.limits.blocks_per_sequence)


def pin_hit(core: Core, model: Model, place: Place, sequence: Sequence, hit: Hit) -> None:
    """Stamp and pin a hit's deepest blocks for the sequence: one on the device, one on the host if that is deeper."""
    blocks = model.blocks
    stamp = core.ledger.stamp()
    sequence.sealed = hit.device_blocks
    sequence.hit_blocks = hit.blocks
    if hit.device_row != NO_ROW:
        place.used[hit.device_row] |= sequence.id >= 0  # a prefetch is no use
        blocks.index.touch(hit.device_row, stamp)
        blocks.pin(place, hit.device_row)
        sequence.anchor = hit.device_row
    if hit.blocks > hit.device_blocks:
        blocks.index.touch(hit.row, stamp)
        blocks.pin(blocks.host, hit.row)
        sequence.host_anchor = hit.row


def _in_place(model: Model, place: Place, sequence: Sequence, hit: Hit) -> tuple[GroupCells, ...]:
    """Fill the sequence's tables with the pages in place, pinning what windows need."""
    if not hit.device_blocks:
        return ()
    path = model.blocks.index.path(hit.device_row)
    for group in place.full_groups:
        pages = place.pages[group]
        sequence.tables[group] = [pages[row] for row in path]
    for group in place.window_groups:
        table = [NO_PAGE] * len(path)
        held = sequence.window_rows.setdefault(group, {})
        for position in window_positions(model.layout, group, hit.blocks):
            if position < len(path):
                row = path[position]
                table[position] = place.pages[group][row]
                model.blocks.use_window(row, hit.row)
                model.blocks.pin_window(place, group, row)
                held[position] = row
        sequence.tables[group] = table
    return tuple(cells(group, 0, table) for group, table in enumerate(sequence.tables))


def _computing(model: Model, keys: bytes, first: int) -> int:
    """How many blocks after the hit somebody is computing now."""
    count = first
    while (count + 1) * KEY_BYTES <= len(keys) and keys[count * KEY_BYTES : (count + 1) * KEY_BYTES] in model.computing:
        count += 1
    return count - first


def _count_reuse(core: Core, model: Model, replica: Replica, row: int) -> None:
    """Count a reuse for every block of the path that has no host copy yet, and back up those that are due.

    The walk ends at the first block with a host copy, so each block pays for it ``threshold`` times at most.
    """
    blocks = model.blocks
    index = blocks.index
    due: list[int] = []
    if not any(pool.capacity for pool in blocks.host.pools):
        return
    while row != NO_ROW and not blocks.host.is_present(row):
        index.reuses[row] = min(index.reuses[row] + 1, 0xFFFF)
        if core.writing.is_due(index.reuses[row]):
            due.append(row)
        row = index.parent[row]
    due.reverse()
    back_up(core, model, replica, due)
