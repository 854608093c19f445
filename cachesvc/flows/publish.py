"""Publish: seal a sequence's next computed blocks under their keys; the first to publish a key wins.

Everything is checked before anything changes: which blocks the keys stand for is looked up once, and what is found then
is what is sealed.
"""

from __future__ import annotations

from cachesvc.flows.backup import back_up
from cachesvc.flows.call import Call, require_on_device
from cachesvc.flows.core import Core
from cachesvc.flows.counters import Count
from cachesvc.flows.match import check_keys
from cachesvc.flows.transfers import wait_for
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.place import NO_ROW, Place
from cachesvc.ledger.reuse import Miss
from cachesvc.ledger.sequences import Sequence
from cachesvc.ledger.tables import Sealed
from cachesvc.model.answers import GroupCells, Published, Wait
from cachesvc.model.errors import Conflict, InvalidRequest, NotOwned
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.words import FILLING, READY, Tier


def publish(core: Core, call: Call, sequence_id: int, first_block: int, keys: bytes, blocks: int) -> Published | Wait:
    """Seal ``blocks`` blocks from ``first_block`` on, which must be the number of sealed blocks.

    ``keys``: packed keys of these blocks; empty where Match has told them. Raises Conflict (out of turn, or sealed
    already), NotOwned (no page there), InvalidRequest (keys that contradict those known), LoadFailed.
    """
    sequence = call.sequence(sequence_id)
    if sequence.swap_ticket:
        return wait_for(core, (sequence.swap_ticket,))
    require_on_device(sequence)
    model, replica = call.model, call.replica
    model.last_used = call.now
    if sequence.loads:
        return wait_for(core, sequence.loads)
    count = _check(core, sequence, first_block, keys, blocks)
    keys = keys or bytes(sequence.keys[first_block * KEY_BYTES : (first_block + count) * KEY_BYTES])
    rows = _rows(model, sequence, keys)
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


def _check(core: Core, sequence: Sequence, first_block: int, keys: bytes, blocks: int) -> int:
    check_keys(core, keys)
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


def _rows(model: Model, sequence: Sequence, keys: bytes) -> list[int]:
    """The rows of the keys, NO_ROW for what is new. Raises InvalidRequest where a key is known below another prefix, or
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
            block = sequence.sealed + at // KEY_BYTES
            raise InvalidRequest(f"block {block}: its key is known below another prefix; keys must be chained")
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
    reuses: dict[int, int] = {}
    for at, row in enumerate(rows):
        if row == NO_ROW:
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
