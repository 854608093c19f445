"""Publish: seal a sequence's next computed blocks under their keys; the first to publish a key wins.

Everything is checked before anything changes: which blocks the keys stand for is looked up once, and what is found then
is what is sealed. Most publishes are straight, those of many sequences at a time, and go through plain loops; one by
one goes only what is a duplicate, on its way here, refused, or has to wait.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import chain

from cachesvc.flows.context.call import Call, require_on_device
from cachesvc.flows.context.core import Core
from cachesvc.flows.context.counters import Count
from cachesvc.flows.context.turns import LAST_TURNS
from cachesvc.flows.engine.match import check_keys
from cachesvc.flows.states import named_states, seal_states
from cachesvc.flows.transfer.backup import back_up
from cachesvc.flows.transfer.transfers import wait_for
from cachesvc.ledger.block_tables import Sealed
from cachesvc.ledger.index.reuse_stats import Miss
from cachesvc.ledger.index.tier_copies import NO_ROW, Place
from cachesvc.ledger.leases import Lease
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.sealing import NewBlocks, seal_new
from cachesvc.ledger.sequences import Sequence
from cachesvc.model.answers import GroupCells, Published, Wait
from cachesvc.model.columns import Publishes
from cachesvc.model.errors import CacheError, Conflict, InvalidRequest, KeyMisplaced, NotOwned
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.words import FILLING, READY, Tier


@dataclass(slots=True)
class Publishing:
    """Progress of a publish that takes several turns: made for the call, handed to each of its runs."""

    done: int = 0
    parts: list[Published] = field(default_factory=list)

    def answer(self) -> Published:
        """Results of all blocks."""
        if len(self.parts) == 1:
            return self.parts[0]
        last = self.parts[-1]
        return Published(
            last.sealed_blocks,
            tuple(position for part in self.parts for position in part.duplicate_positions),
            _join_cells(part.duplicates for part in self.parts),
            _join_cells(part.spares for part in self.parts),
            last.pending,
        )


def publish(
    core: Core,
    call: Call,
    sequence_id: int,
    first_block: int,
    keys: bytes,
    blocks: int,
    publishing: Publishing | None = None,
    states: tuple[GroupCells, ...] = (),
) -> Published | Wait:
    """Seal ``blocks`` blocks from ``first_block`` on, which must be the number of sealed blocks, and then ``states``.

    ``keys``: packed keys of these blocks; empty where Match has told them. Of many some are sealed in each turn;
    ``publishing`` is what one turn tells the next. Where another call of its sequence comes between them, it answers
    what is sealed by then, and that more is to be published. Raises Conflict (out of turn, or sealed already), NotOwned
    (no page there), InvalidRequest (keys that contradict those known), KeyMisplaced, LoadFailed.
    """
    count, most = blocks or len(keys) // KEY_BYTES, _most(core, call)
    if states:
        return _with_states(core, call, sequence_id, first_block, keys, blocks, publishing, states)
    if publishing is None or (count <= most and not publishing.done):
        return _publish(core, call, sequence_id, first_block, keys, blocks)
    if not publishing.done:
        sequence = call.sequence(sequence_id)
        if not (sequence.swap_ticket or sequence.swapped_out or sequence.loads):
            _check(call.lease, sequence, first_block, keys, blocks)
    done = publishing.done
    now = min(most, count - done)
    some = keys[done * KEY_BYTES : (done + now) * KEY_BYTES]
    try:
        part = _publish(core, call, sequence_id, first_block + done, some, now)
    except CacheError:
        if not done:
            raise
        return publishing.answer()._replace(pending=True)
    if isinstance(part, Wait):
        return publishing.answer()._replace(pending=True) if done else part
    publishing.done += now
    publishing.parts.append(part)
    return publishing.answer() if part.pending or publishing.done == count else LAST_TURNS


def _with_states(
    core: Core,
    call: Call,
    sequence_id: int,
    first_block: int,
    keys: bytes,
    blocks: int,
    publishing: Publishing | None,
    states: tuple[GroupCells, ...],
) -> Published | Wait:
    """``publish`` of blocks, if there are any, and of states once these are sealed."""
    sequence = call.sequence(sequence_id)
    count = blocks or len(keys) // KEY_BYTES
    if sequence.swap_ticket:
        return wait_for(core, (sequence.swap_ticket,))
    require_on_device(sequence)
    if sequence.loads:
        return wait_for(core, sequence.loads)
    if not count and first_block != sequence.sealed:
        raise Conflict(f"block {sequence.sealed} comes next, not {first_block}; publish in order")
    named = named_states(call, sequence, states, first_block + count)
    answer = Published(sequence.sealed, (), (), (), False)
    if count:
        told = publish(core, call, sequence_id, first_block, keys, blocks, publishing)
        if isinstance(told, Wait):
            return told
        answer = told
    return answer._replace(kept=seal_states(sequence, named))


def is_tight(core: Core, call: Call) -> bool:
    """True where for each block that is sealed one may be evicted on the host, for its backup."""
    host = call.model.blocks.host
    pool = host.pools[host.lead]
    return core.writing.copies_when_sealed and pool.free < min(core.turns.sealed, pool.usable)


def _most(core: Core, call: Call) -> int:
    """Number of blocks to seal in a turn."""
    return min(core.turns.sealed, core.turns.evicted) if is_tight(core, call) else core.turns.sealed


def _join_cells(parts: Iterable[tuple[GroupCells, ...]]) -> tuple[GroupCells, ...]:
    """Cells of each group, those of one part behind those of another."""
    by_group = zip(*(part for part in parts if part), strict=True)
    return tuple(
        GroupCells(cells[0].group, cells[0].first_block, tuple(page for each in cells for page in each.pages))
        for cells in by_group
    )


def _publish(core: Core, call: Call, sequence_id: int, first_block: int, keys: bytes, blocks: int) -> Published | Wait:
    """``publish`` in one turn."""
    count = blocks or len(keys) // KEY_BYTES
    if not keys or len(keys) == count * KEY_BYTES:
        told: list[int] = []
        _publish_straight(core, call, Publishes((sequence_id,), (first_block,), (0, count), keys), range(1), told, ())
        if told:
            return Published(told[0], (), (), (), False)
    sequence = call.sequence(sequence_id)
    if sequence.swap_ticket:
        return wait_for(core, (sequence.swap_ticket,))
    require_on_device(sequence)
    model, replica = call.model, call.replica
    model.last_used = call.now
    if sequence.loads:
        return wait_for(core, sequence.loads)
    count = _check(call.lease, sequence, first_block, keys, blocks)
    keys = keys or bytes(sequence.keys[first_block * KEY_BYTES : (first_block + count) * KEY_BYTES])
    rows = _rows(core, model, sequence, keys)
    ready, pending = _until_filling(replica.place, rows)
    reuses = _count(model, replica.place, keys, ready, first_block)
    sealed = sequence.seal(keys, ready, core.ledger.stamp, reuses)
    if sealed.rows and core.writing.copies_when_sealed:
        back_up(core, model, replica, sealed.rows)
    if core.on_sealed is not None and sequence.anchor != NO_ROW:
        core.on_sealed(model.id, replica.id, sequence.anchor, len(ready))
    core.count(Count.PUBLISHED_BLOCKS, len(sealed.rows))
    core.count(Count.DUPLICATE_BLOCKS, len(sealed.doubles))
    return _answer(sequence, sealed, pending)


def publish_many(
    core: Core,
    call: Call,
    publishes: Publishes,
    entries: range,
    told: list[int],
    held: Collection[int] = (),
) -> None:
    """``publish`` for ``entries``, in order, as long as each is straight: in turn, with pages, under unpublished keys.
    ``told`` gets the sealed blocks of each; it is short where an entry is left to ``publish``, or its sequence is among
    ``held``, or it takes more turns than one; those behind it are not looked at."""
    starts, most = publishes.starts, _most(core, call)
    if starts[entries.stop] - starts[entries.start] > most:
        long = next((entry for entry in entries if starts[entry + 1] - starts[entry] > most), entries.stop)
        entries = range(entries.start, long)
    _publish_straight(core, call, publishes, entries, told, held)


def _publish_straight(
    core: Core, call: Call, publishes: Publishes, entries: range, told: list[int], held: Collection[int]
) -> None:
    model, replica = call.model, call.replica
    blocks = _all_straight(call, publishes, entries, held) or _find_straight(call, publishes, entries, held)
    if not blocks.keys:
        return
    model.last_used = call.now
    remembered, reuse = model.remembered, model.reuse
    sequences, keys, _ = blocks
    reuse.computed_all(keys)
    reuse.published += len(keys)
    reuses = {key: remembered.pop(key) for key in keys if key in remembered} if remembered else {}
    paths = seal_new(replica.place, blocks, core.ledger.stamps(len(keys) + len(sequences)), reuses)
    if core.writing.copies_when_sealed:  # by one transfer: each costs more than its block
        back_up(core, model, replica, list(chain.from_iterable(paths)))
    if core.on_sealed is not None:
        for path in paths:
            core.on_sealed(model.id, replica.id, path[-1], len(path))
    core.count(Count.PUBLISHED_BLOCKS, len(keys))
    told.extend([sequence.sealed for sequence in sequences])


def _all_straight(call: Call, publishes: Publishes, entries: range, held: Collection[int]) -> NewBlocks | None:
    """The blocks of ``entries`` where all are straight, and of one block each; else None, and each is to be looked at.

    Most steps are so, and what is asked of all at once costs half of what it costs one by one.
    """
    if held or not isinstance(publishes.starts, range):
        return None
    part = slice(entries.start, entries.stop)
    numbers, first_blocks, packed = publishes.sequences[part], publishes.first[part], publishes.keys
    by_number, known_parts = call.lease.sequences, call.model.blocks.index.rows.parts
    named = set(numbers)
    if len(named) < len(numbers) or not by_number.keys() >= named:
        return None
    sequences = [by_number[number] for number in numbers]
    known: list[bytes | bytearray] = []
    has_groups = len(call.replica.place.pools) > 1
    for sequence, first in zip(sequences, first_blocks, strict=True):
        table, own = sequence.tables[0], sequence.own[0]
        if sequence.sealed != first or first >= len(table) or sequence.loads or sequence.failed:
            return None
        if sequence.swap_ticket or sequence.swapped_out:
            return None
        if not (sequence.owns(first, first + 1) if has_groups else table[first] in own):
            return None
        known.append(sequence.keys[first * KEY_BYTES : (first + 1) * KEY_BYTES])
    keys = list(map(bytes, known))
    if packed:
        keys = [packed[at : at + KEY_BYTES] for at in range(part.start * KEY_BYTES, part.stop * KEY_BYTES, KEY_BYTES)]
        if any(told and told != key for told, key in zip(known, keys, strict=True)):
            return None
    if not all(keys) or len(set(keys)) < len(keys):
        return None
    for key in keys:
        if key in known_parts[key[-1]]:
            return None
    return NewBlocks(sequences, keys, range(len(keys) + 1))


def _find_straight(call: Call, publishes: Publishes, entries: range, held: Collection[int]) -> NewBlocks:
    """The blocks of the first entries that are straight."""
    by_number, known_parts = call.lease.sequences, call.model.blocks.index.rows.parts
    packed, part = publishes.keys, slice(entries.start, entries.stop)
    starts = publishes.starts[entries.start : entries.stop + 1]
    sequences: list[Sequence] = []
    fresh: dict[bytes, None] = {}
    bounds = [0]
    seen: set[int] = set()
    for number, first, start, end in zip(
        publishes.sequences[part], publishes.first[part], starts, starts[1:], strict=False
    ):
        sequence = by_number.get(number)
        if sequence is None or number in seen or number in held:
            break
        if sequence.loads or sequence.swap_ticket or sequence.swapped_out or sequence.failed:
            break
        count = end - start
        last = first + count
        if first != sequence.sealed or not first < last <= len(sequence.tables[0]):
            break
        known = sequence.keys[first * KEY_BYTES : last * KEY_BYTES]
        raw = packed[start * KEY_BYTES : end * KEY_BYTES] if packed else bytes(known)
        if len(raw) != count * KEY_BYTES or (packed and known and not raw.startswith(bytes(known))):
            break
        if not sequence.owns(first, last):
            break
        keys = dict.fromkeys([raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)])
        if len(keys) < count or any(key in known_parts[key[-1]] or key in fresh for key in keys):
            break
        fresh |= keys
        bounds.append(len(fresh))
        seen.add(number)
        sequences.append(sequence)
    return NewBlocks(sequences, list(fresh), bounds)


def _check(lease: Lease, sequence: Sequence, first_block: int, keys: bytes, blocks: int) -> int:
    check_keys(lease, keys)
    count = blocks or len(keys) // KEY_BYTES
    if keys and len(keys) // KEY_BYTES != count:
        raise InvalidRequest(f"{len(keys) // KEY_BYTES} keys were sent for {count} blocks")
    if first_block < sequence.sealed:
        raise Conflict(
            f"blocks from {first_block} on are sealed already (the sequence has {sequence.sealed}); publish the next"
        )
    if first_block > sequence.sealed:
        raise Conflict(f"block {sequence.sealed} comes next, not {first_block}; publish in order")
    if first_block + count > sequence.blocks:
        raise NotOwned(
            f"sequence {sequence.id} has pages for {sequence.blocks} blocks, not for {first_block + count}; "
            "allocate first"
        )
    known = sequence.keys[first_block * KEY_BYTES : (first_block + count) * KEY_BYTES]
    if keys:
        if not keys.startswith(bytes(known)):
            raise InvalidRequest(f"keys from block {first_block} on contradict those of Match")
    elif len(known) < count * KEY_BYTES:
        raise InvalidRequest(f"the keys of {count} blocks from {first_block} on are not known; send them")
    return count


def _rows(core: Core, model: Model, sequence: Sequence, keys: bytes) -> list[int]:
    """The rows of the keys, NO_ROW for what is new. Raises KeyMisplaced where a key is known below another prefix, or
    named twice."""
    index = model.blocks.index
    rows: list[int] = []
    above = sequence.anchor
    fresh: set[bytes] = set()
    for at in range(0, len(keys), KEY_BYTES):
        key = keys[at : at + KEY_BYTES]
        row = index.rows.get(key, NO_ROW)
        if row == NO_ROW:
            is_chained = key not in fresh
            fresh.add(key)
        else:
            is_chained = not fresh and index.parent[row] == above
        if not is_chained:
            core.count(Count.KEYS_MISPLACED)
            raise KeyMisplaced(sequence.sealed + at // KEY_BYTES)
        rows.append(row)
        above = row
    return rows


def _until_filling(place: Place, rows: list[int]) -> tuple[list[int], bool]:
    """The rows that can be sealed now, and whether one that is on its way here ends them."""
    states = place.states[place.lead]
    for at, row in enumerate(rows):
        if row != NO_ROW and states[row] == FILLING:
            return rows[:at], True
    return rows, False


def _count(model: Model, place: Place, keys: bytes, rows: list[int], first_block: int) -> dict[int, int]:
    """Count what was computed, and what for the second time. Returns reuse counts of new blocks that are remembered, by
    position."""
    reuse, host, states = model.reuse, model.blocks.host, place.states[place.lead]
    index = model.blocks.index
    reuses: dict[int, int] = {}
    for at, row in enumerate(rows):
        if row == NO_ROW or (index.losses and not index.has_copy(row)):
            key = keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
            reuse.computed(key)
            if model.remembered and (remembered := model.remembered.pop(key, 0)):
                reuses[first_block + at] = remembered
        elif states[row] >= READY:
            reuse.computed_again(Tier.DEVICE.value, Miss.DUPLICATE)
        else:
            tier = Tier.HOST if host.is_present(row) else Tier.DEVICE
            reuse.computed_again(tier.value, Miss.ELSEWHERE)
    reuse.published += len(rows)
    return reuses


def _answer(sequence: Sequence, sealed: Sealed, pending: bool) -> Published:
    doubles = sealed.doubles
    if not doubles:
        return Published(sequence.sealed, (), (), (), pending)
    duplicates = tuple(
        GroupCells(group, doubles[0], tuple([table[position] for position in doubles]))
        for group, table in enumerate(sequence.tables)
    )
    spares = tuple(
        GroupCells(group, doubles[0], tuple(page for owner, page in sealed.spares if owner == group))
        for group in range(len(sequence.tables))
    )
    return Published(sequence.sealed, tuple(doubles), duplicates, spares, pending)
