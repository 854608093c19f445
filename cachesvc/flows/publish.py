"""Publish: seal a sequence's next computed blocks under their keys; the first to publish a key wins.

``classify`` holds a batch to the rules before anything changes, and looks each key up once. The first entries whose
keys are all new are sealed together, by columns; a single call is a batch of one. An entry with keys that the index has
is sealed by itself: they are duplicates of what others sealed first, or blocks on their way here.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple

from cachesvc.flows.core import LAST_TURNS, LONG_TURNS, Call, Core, Count, Slices, no_sequence, refusal_of
from cachesvc.flows.loads import back_up, back_up_copies
from cachesvc.flows.match import check_keys
from cachesvc.flows.transfers import wait_for
from cachesvc.ledger.block_index import BlockIndex
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.reuse_stats import Miss
from cachesvc.ledger.sealing import NewBlocks, seal_new
from cachesvc.ledger.sequence_state import ACTIVE, PASSING
from cachesvc.ledger.sequences import OpenSequence, Sealed
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.answers import GroupCells, Published, Publishes, Wait, before_repeated
from cachesvc.model.errors import CacheError, Conflict, InvalidRequest, KeyMisplaced, LedgerBroken, NotOwned
from cachesvc.model.words import FILLING, KEY_BYTES, NO_PAGE, READY, Tier
from cachesvc.policy.eviction import RequestHint, hinted


class Blocked(NamedTuple):
    """An entry that can be looked at when one of these tickets has ended."""

    tickets: tuple[int, ...]


class Known(NamedTuple):
    """An entry with keys that the index has: ``rows`` of its packed ``keys``, NO_ROW for one that is new."""

    sequence: OpenSequence
    keys: bytes
    rows: list[int]


Stop = Known | Blocked | CacheError | None
"""Reason why an entry is not sealed with those before it. None: it comes behind one of its own sequence or with the
same key, or a call of its sequence waits."""


Publishing = Slices[Published]


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

    ``keys``: packed keys of these blocks; empty if Match has named them. ``publishing``: progress between slices;
    without it all are sealed in one. Where another call of the sequence comes between slices, the answer is what is
    sealed by then, and that more is to be published. Raises Conflict (out of turn, or sealed already), NotOwned (no
    page there), InvalidRequest (keys that contradict those known), KeyMisplaced, LoadFailed.
    """
    if publishing is not None and publishing.has_begun:
        return publishing.go_on(call)
    count = blocks or len(keys) // KEY_BYTES
    whole = Publishes((sequence_id,), (first_block,), (0, count), keys)
    if not states:
        _check_count(call, keys, count)
        if publishing is None or count <= _most(core, call):
            return _publish(core, call, whole, None)
    return (publishing or Publishing()).begin(_in_slices(core, call, whole, states))


def _check_count(call: Call, keys: bytes, count: int) -> None:
    if keys:
        check_keys(call.lease, keys)
        if len(keys) != count * KEY_BYTES:
            raise InvalidRequest(f"{len(keys) // KEY_BYTES} keys were sent for {count} blocks")


def _in_slices(
    core: Core, call: Call, whole: Publishes, states: tuple[GroupCells, ...]
) -> Generator[Wait, Call, Published]:
    """Seal blocks of one sequence, if there are any, some in each slice; and states once their blocks are sealed."""
    (number,), (first,), (_, count), keys = whole
    named: NamedStates | None = None
    if states:
        sequence = call.lease.sequences.get(number)
        while sequence is None or sequence.state is not ACTIVE:
            why = _inactive(number, sequence)
            if not isinstance(why, Blocked):
                raise why
            call = yield wait_for(core, why.tickets)
            sequence = call.lease.sequences.get(number)
        if not count and first != sequence.sealed:
            raise Conflict(f"block {sequence.sealed} comes next, not {first}; publish in order")
        named = named_states(call, sequence, states, first + count)
        if not count:
            seal_states(core, call, sequence, named)
            return Published(sequence.sealed, (), (), (), False, named.kept())
        _check_count(call, keys, count)
    # Blocks that a slice has sealed stay sealed, and other calls use them. So every rule that needs no look-up is held
    # against the whole request before the first slice, while a refusal still means that nothing has changed. Behind it
    # neither an error nor a wait may be the answer: the caller must learn what is sealed, with ``pending``.
    parts: list[Published] = []
    done, has_lined_up, is_cut_short = 0, False, False
    while done < count and not is_cut_short:
        most = _most(core, call)
        if count > most and not done:
            _, stop = classify(call, whole, range(1), looks_up=False)
            if isinstance(stop, CacheError):
                raise stop
            if stop is None and count > LONG_TURNS * most and not has_lined_up:
                has_lined_up = True
                call = yield Wait((), turns=-(-count // most))
                continue
        now = min(most, count - done)
        part: Published | Wait | None = None
        try:
            part = _publish(core, call, Publishes((number,), (first + done,), (done, done + now), keys), named)
        except CacheError:
            if not done:
                raise
        if isinstance(part, Published):
            parts.append(part)
            done += now
            if part.pending:
                break
            if done < count:
                call = yield LAST_TURNS
        elif part is None or done:
            is_cut_short = True
        else:
            call = yield part
    last = parts[-1]
    return Published(
        last.sealed_blocks,
        tuple(position for part in parts for position in part.duplicate_positions),
        _join_cells([part.duplicates for part in parts]),
        _join_cells([part.spares for part in parts]),
        last.pending or is_cut_short,
        () if named is None else named.kept(),
    )


def publish_many(
    core: Core,
    call: Call,
    publishes: Publishes,
    entries: range,
    answers: list[int],
    held: Collection[int] = (),
) -> None:
    """Seal the first of ``entries``, in order, as long as all their keys are new. ``answers`` gets the sealed blocks of
    each; it is short where an entry is left to ``publish``, or its sequence is among ``held``, or it takes more turns
    than one; those behind it are not looked at."""
    starts, most = publishes.starts, _most(core, call)
    if starts[entries.stop] - starts[entries.start] > most:
        long = next((entry for entry in entries if starts[entry + 1] - starts[entry] > most), entries.stop)
        entries = range(entries.start, long)
    fresh, _ = classify(call, publishes, entries, held)
    if fresh.keys:
        answers += _commit_new(core, call, fresh)


def _publish(core: Core, call: Call, one: Publishes, named: NamedStates | None) -> Published | Wait:
    """Seal a batch of one entry in one turn."""
    fresh, stop = classify(call, one, range(1))
    if fresh.keys:
        return Published(_commit_new(core, call, fresh, named)[0], (), (), (), False)
    if isinstance(stop, Known):
        return _commit_known(core, call, stop, named)
    if isinstance(stop, Blocked):
        return wait_for(core, stop.tickets)
    if isinstance(stop, KeyMisplaced):
        core.count(Count.KEYS_MISPLACED)
    assert stop is not None, "the only entry comes behind no other"
    raise stop


def is_tight(core: Core, call: Call) -> bool:
    """True where for each block that is sealed one may be evicted on the host, for its backup."""
    host = call.model.blocks.host
    pool, pages = host.pools[host.lead], core.turns.sealed * (1 + len(host.window_groups))
    return core.writing.copies_when_sealed and pool.free < min(pages, pool.usable)


def _most(core: Core, call: Call) -> int:
    """Number of blocks to seal in a turn. Their windows and states go to the host with them."""
    groups = 1 + len(call.model.blocks.host.window_groups)
    return min(core.turns.sealed, max(1, core.turns.evicted // groups)) if is_tight(core, call) else core.turns.sealed


def _join_cells(parts: Iterable[tuple[GroupCells, ...]]) -> tuple[GroupCells, ...]:
    """Cells of each group, those of one part behind those of another."""
    by_group = zip(*(part for part in parts if part), strict=True)
    return tuple(
        GroupCells(cells[0].group, cells[0].first_block, tuple(page for each in cells for page in each.pages))
        for cells in by_group
    )


def classify(
    call: Call, batch: Publishes, entries: range, held: Collection[int] = (), *, looks_up: bool = True
) -> tuple[NewBlocks, Stop]:
    """Hold entries to the rules, in order, up to the first that does not seal new blocks alone. Returns the new blocks
    of those before it, and why it stopped. Without ``looks_up`` no key is looked up, and nothing is new."""
    # One loop with every rule in it, for a Step publishes a block of each of its sequences: a call a rule would cost
    # more than the rule. The state comes first: it decides whether tables and keys mean anything. The position is next:
    # a retry of what is sealed must hear that, whatever its keys. A key is looked up only where all else holds, and an
    # entry whose keys another entry of the batch has sealed meanwhile is looked at anew behind that one.
    by_number, parts = call.lease.sequences, call.model.blocks.index.rows.parts
    has_groups = len(call.replica.place.pools) > 1
    starts, packed = batch.starts[entries.start : entries.stop + 1], batch.keys
    numbers = before_repeated(batch.sequences[entries.start : entries.stop], held)
    sequences: list[OpenSequence] = []
    fresh: dict[bytes, None] = {}
    stop: Stop = None
    for number, first, start, end in zip(
        numbers, batch.first[entries.start : entries.stop], starts, starts[1:], strict=False
    ):
        sequence = by_number.get(number)
        if sequence is None or sequence.state is not ACTIVE:
            stop = _inactive(number, sequence)
            break
        count = end - start
        last, table = first + count, sequence.tables[0]
        if first != sequence.sealed or last > len(table):
            stop = _misplaced(sequence, first, last)
            break
        keys = known = bytes(sequence.keys[first * KEY_BYTES : last * KEY_BYTES])
        if packed:
            keys = packed[start * KEY_BYTES : end * KEY_BYTES]
            if known and not keys.startswith(known):
                stop = InvalidRequest(f"keys from block {first} on contradict those of Match")
                break
        elif len(known) < count * KEY_BYTES:
            stop = InvalidRequest(f"the keys of {count} blocks from {first} on are not known; send them")
            break
        if not (sequence.owns(first, last) if has_groups or count != 1 else table[first] in sequence.own[0]):
            raise LedgerBroken(f"sequence {number} has others' pages for blocks {first} to {last}")
        if not looks_up:
            continue
        if count == 1:
            if keys in fresh:
                break
            if keys in parts[keys[-1]]:
                stop = _known(call.model.blocks.index, sequence, keys)
                break
            fresh[keys] = None
        else:
            each = dict.fromkeys([keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)])
            if not fresh.keys().isdisjoint(each):
                break
            if len(each) < count or not each or any(key in parts[key[-1]] for key in each):
                stop = _known(call.model.blocks.index, sequence, keys)
                break
            fresh |= each
        sequences.append(sequence)
    is_one_each = len(fresh) == len(sequences)
    bounds = range(len(fresh) + 1) if is_one_each else [at - starts[0] for at in starts[: len(sequences) + 1]]
    return NewBlocks(sequences, list(fresh), bounds), stop


def _inactive(number: int, sequence: OpenSequence | None) -> Blocked | CacheError:
    """Reason why nothing can be published of a sequence now, or any more."""
    if sequence is None:
        return no_sequence(number)
    if sequence.state in PASSING:
        return Blocked(tuple(sequence.awaited))
    return refusal_of(sequence)


def _misplaced(sequence: OpenSequence, first: int, last: int) -> CacheError:
    """Reason why ``[first, last)`` are not its next blocks."""
    sealed = sequence.sealed
    if first < sealed:
        return Conflict(f"blocks from {first} on are sealed already (the sequence has {sealed}); publish the next")
    if first > sealed:
        return Conflict(f"block {sealed} comes next, not {first}; publish in order")
    return NotOwned(f"sequence {sequence.id} has pages for {sequence.blocks} blocks, not for {last}; allocate first")


def _known(index: BlockIndex, sequence: OpenSequence, keys: bytes) -> Known | KeyMisplaced:
    """The rows of an entry's keys; KeyMisplaced where a key is known below another prefix, or named twice."""
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
            return KeyMisplaced(sequence.sealed + at // KEY_BYTES)
        rows.append(row)
        above = row
    return Known(sequence, keys, rows)


def _commit_new(core: Core, call: Call, fresh: NewBlocks, named: NamedStates | None = None) -> list[int]:
    """Seal blocks whose keys are new, and of a single sequence the ``named`` states. Returns how many are sealed of
    each of their sequences."""
    model, replica = call.model, call.replica
    model.last_used = call.now
    sequences, keys, _ = fresh
    reuses = _take_reuses(model, keys)
    paths = seal_new(replica.place, fresh, core.ledger.stamps(len(keys) + len(sequences)), reuses)
    _restamp(replica.place, sequences, paths)
    if named is not None:  # before the blocks are copied to the host: their states go along
        seal_states(core, call, fresh.tables[0], named)
    if core.writing.copies_when_sealed:  # by one transfer: each costs more than its block
        kept = [path for each, path in zip(sequences, paths, strict=True) if each.retention != RequestHint.ONCE]
        back_up(core, model, replica, list(chain.from_iterable(kept)))
    model.reuse.computed_all(keys)
    model.reuse.published += len(keys)
    for listener in core.on_sealed:
        for path in paths:
            listener(model.id, replica.id, path[-1], len(path))
    core.count(Count.PUBLISHED_BLOCKS, len(keys))
    return [sequence.sealed for sequence in sequences]


def _commit_known(core: Core, call: Call, known: Known, named: NamedStates | None) -> Published:
    """Seal blocks of one sequence some of which the index has, up to one that is on its way here, and states."""
    model, replica = call.model, call.replica
    model.last_used = call.now
    sequence, keys, rows = known
    ready, pending = _until_filling(replica.place, rows)
    new = [keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at, row in enumerate(ready) if row == NO_ROW]
    _note_sealing(core, call, keys, ready)
    retention, blocks = RequestHint(sequence.retention), replica.place.pools[replica.place.lead].usable
    sealed = sequence.seal(
        keys, ready, lambda: hinted(core.ledger.stamp(), retention, blocks), _take_reuses(model, new)
    )
    if named is not None:
        seal_states(core, call, sequence, named)
    if sealed.rows and core.writing.copies_when_sealed and retention is not RequestHint.ONCE:
        back_up(core, model, replica, sealed.rows)
    for listener in core.on_sealed if sequence.anchor != NO_ROW else ():
        listener(model.id, replica.id, sequence.anchor, len(ready))
    core.count(Count.PUBLISHED_BLOCKS, len(sealed.rows))
    core.count(Count.DUPLICATE_BLOCKS, len(sealed.doubles))
    return _answer(sequence, sealed, pending)


def _restamp(place: Place, sequences: Iterable[OpenSequence], paths: Iterable[Sequence[int]]) -> None:
    """Blocks that were just sealed count as used when their engines expect them to be."""
    for each, path in zip(sequences, paths, strict=True):
        if each.retention:
            kind, blocks = RequestHint(each.retention), place.pools[place.lead].usable
            each.ledger.index.restamp(path, partial(hinted, retention=kind, pool_blocks=blocks))


def _take_reuses(model: Model, keys: Iterable[bytes]) -> dict[bytes, int]:
    """Remembered reuse counts of blocks that were dropped and are new again."""
    remembered = model.remembered
    return {key: remembered.pop(key) for key in keys if key in remembered} if remembered else {}


def _until_filling(place: Place, rows: list[int]) -> tuple[list[int], bool]:
    """The rows that can be sealed now, and whether one that is on its way here ends them."""
    states = place.states[place.lead]
    for at, row in enumerate(rows):
        if row != NO_ROW and states[row] == FILLING:
            return rows[:at], True
    return rows, False


def _answer(sequence: OpenSequence, sealed: Sealed, pending: bool) -> Published:
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


def _note_sealing(core: Core, call: Call, keys: bytes, rows: Sequence[int]) -> None:
    """Blocks in ``rows`` (NO_ROW: a new one), under packed ``keys``, are about to be sealed: count what was computed,
    and what for the second time."""
    model, place = call.model, call.replica.place
    reuse, host, states = model.reuse, model.blocks.host, place.states[place.lead]
    index = model.blocks.index
    for at, row in enumerate(rows):
        if row == NO_ROW or (index.losses and not index.has_copy(row)):
            reuse.computed(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])
        elif states[row] >= READY:
            reuse.computed_again(Tier.DEVICE.value, Miss.DUPLICATE)
        else:
            tier = Tier.HOST if host.is_present(row) else Tier.DEVICE
            reuse.computed_again(tier.value, Miss.ELSEWHERE)
    reuse.published += len(rows)


class NamedState(NamedTuple):
    """A page of a sequence that is to be published as the state at a position."""

    group: int
    position: int
    page: int


@dataclass(slots=True)
class NamedStates:
    """States of one publish. ``left``: those whose block is not sealed yet; ``refused``: those that are there."""

    left: list[NamedState]
    refused: list[NamedState] = field(default_factory=list)

    def kept(self) -> tuple[GroupCells, ...]:
        """States that were not sealed: their pages are the sequence's own still."""
        return tuple(GroupCells(group, position, (page,)) for group, position, page in (*self.refused, *self.left))


def named_states(call: Call, sequence: OpenSequence, cells: Sequence[GroupCells], blocks: int) -> NamedStates:
    """The states that ``cells`` name, of a sequence that will have ``blocks`` sealed blocks. Raises InvalidRequest (no
    group of states, a position behind those blocks, a page named twice), NotOwned (a page that is not its own)."""
    found: list[NamedState] = []
    for group, first, pages, _ in cells:
        if group not in call.model.layout.state_groups:
            raise InvalidRequest(f"group {group} has no states; its blocks are published with their keys")
        found += [NamedState(group, first + at, page) for at, page in enumerate(pages) if page != NO_PAGE]
    for group, position, page in found:
        if position >= blocks:
            raise InvalidRequest(f"a state at block {position} needs that block published; there are {blocks}")
        if page not in sequence.own[group]:
            raise NotOwned(f"page {page} of group {group} is not sequence {sequence.id}'s own")
        if sequence.pages_ahead and page not in sequence.tables[group]:
            raise NotOwned(f"page {page} of group {group} is in no table of sequence {sequence.id} yet")
    if len({(group, page) for group, _, page in found}) < len(found):
        raise InvalidRequest("a page is named as two states; name each once")
    return NamedStates(found)


def seal_states(core: Core, call: Call, tables: OpenSequence, named: NamedStates) -> None:
    """Seal the states whose blocks are sealed by now. Those of blocks that the host has, or is getting, follow there;
    the others go with their blocks."""
    sealed: list[tuple[int, int]] = []
    ready = [state for state in named.left if state.position < tables.sealed]
    named.left = [state for state in named.left if state.position >= tables.sealed]
    for state in ready:
        row = tables.seal_state(*state) if state.page in tables.own[state.group] else NO_ROW
        if row == NO_ROW:
            named.refused.append(state)
        else:
            sealed.append((state.group, row))
    if sealed and core.writing.copies_when_sealed:
        back_up_copies(core, call.model, call.replica, sealed)
