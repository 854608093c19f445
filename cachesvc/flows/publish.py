"""Publish: seal a sequence's next computed blocks under their keys; the first to publish a key wins."""

from __future__ import annotations

from cachesvc.flows.allocate import withdraw_computing
from cachesvc.flows.backup import back_up
from cachesvc.flows.call import Call
from cachesvc.flows.core import Core, cells, require_on_device, wait_for
from cachesvc.flows.match import check_keys
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.place import NO_ROW
from cachesvc.ledger.reuse import Miss
from cachesvc.ledger.sequences import Sequence
from cachesvc.model.answers import Published, Wait
from cachesvc.model.errors import Conflict, InvalidRequest, NotOwned
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.words import ABSENT, FILLING, NO_PAGE, READY, PageState, Tier


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
    running = tuple(ticket for ticket in sequence.loads if core.ledger.tickets.is_running(ticket))
    if running:
        return wait_for(core, running)
    count = _check(core, sequence, first_block, keys, blocks)
    first = sequence.sealed
    keys = keys or bytes(sequence.keys[first * KEY_BYTES : (first + count) * KEY_BYTES])
    _check_chain(model, sequence, keys)
    sequence.keys[first * KEY_BYTES :] = keys + sequence.keys[(first + count) * KEY_BYTES :]
    fresh_rows: list[int] = []
    doubles: list[int] = []
    spares: list[tuple[int, int]] = []
    tip = sequence.anchor
    pending = False
    for position in range(first, first + count):
        row, state = _seal_one(core, model, replica, sequence, position, tip, spares)
        if state == FILLING:
            pending = True
            break
        (doubles if state == READY else fresh_rows).append(position if state == READY else row)
        tip = row
        sequence.sealed = position + 1
    _advance(core, model, replica, sequence, first, tip)
    if fresh_rows and core.writing.copies_when_sealed:
        back_up(core, model, replica, fresh_rows)
    model.reuse.published += len(fresh_rows) + len(doubles)
    if core.on_sealed is not None and tip != NO_ROW:
        core.on_sealed(model.id, replica.id, tip, sequence.sealed - first)
    core.count("published_blocks", len(fresh_rows))
    core.count("duplicate_blocks", len(doubles))
    return _answer(sequence, doubles, spares, pending)


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


def _check_chain(model: Model, sequence: Sequence, keys: bytes) -> None:
    """Raises InvalidRequest where a key is known below another prefix, or named twice."""
    index = model.blocks.index
    above: int | None = sequence.anchor  # None: a block that is new
    fresh: set[bytes] = set()
    for at in range(0, len(keys), KEY_BYTES):
        key = keys[at : at + KEY_BYTES]
        row = index.rows.get(key)
        if key in fresh or (row is not None and index.parent[row] != above):
            block = sequence.sealed + at // KEY_BYTES
            raise InvalidRequest(f"block {block}: its key is known below another prefix; keys must be chained")
        above = row
        if row is None:
            fresh.add(key)


def _seal_one(
    core: Core,
    model: Model,
    replica: Replica,
    sequence: Sequence,
    position: int,
    tip: int,
    spares: list[tuple[int, int]],
) -> tuple[int, int]:
    """Seal one block below ``tip``. Returns its row and ABSENT (sealed now), READY (a duplicate) or FILLING (wait)."""
    blocks = model.blocks
    index = blocks.index
    place = replica.place
    key = sequence.key(position)
    row = index.rows.get(key, NO_ROW)
    if row == NO_ROW:
        model.reuse.computed(key)
        remembered = model.remembered.pop(key, 0)
        row = index.insert(key, tip, core.ledger.stamp(), remembered)
    elif place.state(row) == FILLING:
        return row, FILLING
    elif place.is_hittable(row):
        spares += _take_sealed(replica, sequence, position, row)
        model.reuse.computed_again(Tier.DEVICE.value, Miss.DUPLICATE)
        return row, READY
    else:
        tier = Tier.HOST if blocks.host.is_present(row) else Tier.DEVICE
        model.reuse.computed_again(tier.value, Miss.ELSEWHERE)
    pages = [table[position] for table in sequence.tables]
    blocks.add_copy(place, row, pages, READY)
    for group, page in enumerate(pages):
        if page != NO_PAGE:
            place.pools[group].move(page, PageState.SEALED)
            sequence.own[group].remove(page)
    return row, ABSENT


def _take_sealed(replica: Replica, sequence: Sequence, position: int, row: int) -> list[tuple[int, int]]:
    """Put the sealed pages into the table; the sequence's own become spares, which are returned.

    A windowed group may have dropped its sealed page: then the sequence's own page is sealed in its place.
    """
    place = replica.place
    spares: list[tuple[int, int]] = []
    for group, table in enumerate(sequence.tables):
        own = table[position]
        if own == NO_PAGE:
            continue
        if place.states[group][row] == ABSENT:
            place.move(group, row, READY, own)
            place.pools[group].move(own, PageState.SEALED)
            sequence.own[group].remove(own)
        elif place.states[group][row] >= READY:
            spares.append((group, own))
            table[position] = place.pages[group][row]
    return spares


def _advance(core: Core, model: Model, replica: Replica, sequence: Sequence, first: int, tip: int) -> None:
    """Move the anchor to the deepest sealed block and pin what the windows still need."""
    if tip == sequence.anchor:
        return
    blocks = model.blocks
    place = replica.place
    blocks.pin(place, tip)
    blocks.index.touch(tip, core.ledger.stamp())
    if sequence.anchor != NO_ROW:
        blocks.unpin(place, sequence.anchor)
    if place.window_groups:
        _pin_windows(model, replica, sequence, first, tip)
    sequence.anchor = tip
    withdraw_computing(model, sequence, first, sequence.sealed)


def _pin_windows(model: Model, replica: Replica, sequence: Sequence, first: int, tip: int) -> None:
    place = replica.place
    path = model.blocks.index.path(tip, sequence.anchor)
    for group in place.window_groups:
        held = sequence.window_rows.setdefault(group, {})
        for position, row in enumerate(path, start=first):
            page = sequence.tables[group][position]
            if page != NO_PAGE and place.pages[group][row] == page:
                model.blocks.pin_window(place, group, row)
                held[position] = row


def _answer(sequence: Sequence, doubles: list[int], spares: list[tuple[int, int]], pending: bool) -> Published:
    if not doubles:
        return Published(sequence.sealed, (), (), (), pending)
    duplicates = tuple(
        cells(group, doubles[0], [table[position] for position in doubles])
        for group, table in enumerate(sequence.tables)
    )
    own = tuple(
        cells(group, doubles[0], [page for owner, page in spares if owner == group])
        for group in range(len(sequence.tables))
    )
    return Published(sequence.sealed, tuple(doubles), duplicates, own, pending)
