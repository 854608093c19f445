"""Recycle: give back what fell out of every window, and spare or stock pages.

A block j of a window W is dead for the next query position T once (j + 1) * block_tokens <= T - W + 1, the window
counting the query itself; only computed and verified tokens count. Where steps overlap, T counts those whose step has
ended: a step in flight looks back from there on, so its pages stay.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Generator
from collections.abc import Sequence as Seq

import numpy as np

from cachesvc.flows.core import LAST_TURNS, TURN, Call, Core, Slices, no_sequence, refusal_of
from cachesvc.flows.loads import back_up_copies
from cachesvc.flows.stored import note_end
from cachesvc.flows.transfers import look_ahead
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.sequence_state import FAILED, ON_DEVICE
from cachesvc.ledger.sequences import WINDOW_COST, Keep, OpenSequence
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.model.answers import Ended, GroupCells, Recycled, Releases, Wait
from cachesvc.model.errors import CacheError, InvalidRequest, NotOwned
from cachesvc.model.numbers import among, column
from cachesvc.model.words import NO_PAGE, PageState
from cachesvc.policy.eviction import RequestHint

RECYCLES = ON_DEVICE | {FAILED}
"""States in which a sequence gives back window blocks: what it can do without goes even where a load has failed."""


Recycling = Slices[Recycled]


def recycle(
    core: Core,
    call: Call,
    sequence_id: int,
    computed_tokens: int,
    pages: tuple[GroupCells, ...],
    recycling: Recycling | None = None,
    dead_blocks: tuple[int, ...] = (),
) -> Recycled | Wait:
    """Free dead window blocks of the sequence below ``computed_tokens``, and the ``pages`` named. ``dead_blocks``: of
    each windowed group, the number of blocks that are dead at its engine's word, where that is not 0.

    ``recycling``: progress between slices; without it all go in one. ``sequence_id`` 0 with no such sequence is an
    error only when ``computed_tokens`` is set; pages alone may be stock.
    Raises NotOwned (nothing is freed then), InvalidRequest (a page that is still in a full group's table), NotFound.
    """
    if recycling is not None and recycling.has_begun:
        return recycling.go_on(call)
    model, groups = call.model, call.replica.place.window_groups
    sequence = call.lease.sequences.get(sequence_id)
    dead_of = dict(zip(groups, dead_blocks, strict=False))
    is_due = bool(computed_tokens or any(dead_blocks))
    if sequence is None and (is_due or not pages):
        sequence = call.known_sequence(sequence_id)
    named = _owned(call, sequence, pages)
    if sequence is not None and is_due:
        if sequence.state not in RECYCLES:
            raise refusal_of(sequence)
        _check_computed(model, sequence, computed_tokens, dead_blocks)
    _free_named(call, sequence, named)
    freed = sum(len(stock) + len(own) for _, stock, own in named)
    if sequence is None or not is_due:
        return Recycled(freed, () if sequence is None else tuple(sequence.cursors.values()))
    dead = {group: dead_of.get(group) or _dead_blocks(model, group, computed_tokens) for group in groups}
    if recycling is not None:
        return recycling.begin(_in_slices(call, sequence_id, dead, freed, most_positions(core)))
    for group, until in dead.items():
        freed += sequence.recycle(group, until)
    return Recycled(freed, tuple(sequence.cursors.values()))


def _in_slices(
    call: Call, sequence_id: int, dead: dict[int, int], freed: int, most: int
) -> Generator[Wait, Call, Recycled]:
    """Free the first ``dead[g]`` blocks of windowed groups, ``most`` positions a slice. ``freed``: pages so far."""
    sequence, left = call.lease.sequences[sequence_id], most
    for group, last in dead.items():
        while True:
            cursor = sequence.cursors[group]
            until = min(last, cursor + max(left, 0))
            freed += sequence.recycle(group, until)
            left -= max(0, until - cursor)
            if until >= last:
                break
            call = yield LAST_TURNS
            again = call.lease.sequences.get(sequence_id)
            if again is None or again.state not in RECYCLES:
                return Recycled(freed, ())  # another call came between the slices
            sequence, left = again, most
    return Recycled(freed, tuple(sequence.cursors.values()))


def _free_named(call: Call, sequence: OpenSequence | None, named: list[tuple[int, set[int], set[int]]]) -> None:
    """Free pages of the stock, and a sequence's own ones, of each group."""
    place = call.replica.place
    for group, stock, own in named:
        call.lease.stock[group] -= stock
        place.pools[group].move_all(stock, PageState.FREE)
        if sequence is not None:
            sequence.own[group] -= own
            if own and group in place.window_groups:
                cells = column(sequence.tables[group])
                cells[np.isin(cells, list(own))] = NO_PAGE
        place.pools[group].move_all(own, PageState.FREE)


def _due(call: Call, sequence: OpenSequence, tokens: int) -> int:
    """Positions of all windows that are to be given back."""
    dead = [(group, _dead_blocks(call.model, group, tokens)) for group in call.replica.place.window_groups]
    return sum(max(0, last - sequence.cursors[group]) for group, last in dead)


def most_positions(core: Core) -> int:
    """Positions of a window that are given back in a turn."""
    return max(1, core.turns.pages // WINDOW_COST)


def recycle_many(
    core: Core,
    call: Call,
    recycles: tuple[Seq[int], Seq[int]],
    entries: range,
    answers: list[int],
    held: Container[int] = (),
) -> None:
    """``recycle`` without pages for ``entries`` of sequences and their computed tokens, in order. ``answers`` gets the
    pages of each; it is short where an entry is refused, or takes more turns than one, or its sequence is among
    ``held``."""
    for entry in entries:
        number, tokens = recycles[0][entry], recycles[1][entry]
        sequence = call.lease.sequences.get(number)
        if number in held or (sequence is not None and tokens and _due(call, sequence, tokens) > most_positions(core)):
            return
        try:
            recycled = recycle(core, call, number, tokens, ())
        except CacheError:
            return
        assert isinstance(recycled, Recycled), "without turns it is done at once"
        answers.append(recycled.pages)


def _owned(
    call: Call, sequence: OpenSequence | None, pages: tuple[GroupCells, ...]
) -> list[tuple[int, set[int], set[int]]]:
    """Named pages by group: those in the lease's stock, by the first group of their pool, and the sequence's own."""
    out: dict[int, tuple[int, set[int], set[int]]] = {}
    leads, count = call.model.layout.pool_leads, 0
    for group, _, group_pages, _ in pages:
        if not 0 <= group < len(call.lease.stock):
            raise InvalidRequest(f"there is no group {group}")
        lead = leads[group]
        of_stock = call.lease.stock[lead].intersection(group_pages)
        rest = set(group_pages) - of_stock
        if rest:
            _check_own(sequence, group, rest, is_windowed=group in call.replica.place.window_groups)
        out.setdefault(lead, (lead, set(), set()))[1].update(of_stock)
        out.setdefault(group, (group, set(), set()))[2].update(rest)
        count += len(group_pages)
    if sum(len(stock) + len(own) for _, stock, own in out.values()) != count:
        raise InvalidRequest("a page is named twice in one recycle; name each once")
    return list(out.values())


def _check_own(sequence: OpenSequence | None, group: int, pages: set[int], *, is_windowed: bool) -> None:
    if sequence is None or sequence.pages_ahead or not pages <= sequence.own[group]:
        own = set() if sequence is None or sequence.pages_ahead else sequence.own[group]
        page = min(pages - own)
        raise NotOwned(f"page {page} of group {group} is neither in the lease's stock nor a sequence's own")
    in_table = among(column(array("i", pages)), column(sequence.tables[group]))
    if sequence.swap_ticket or (in_table.any() and not is_windowed):
        page = min(pages) if sequence.swap_ticket else list(pages)[int(in_table.argmax())]
        raise InvalidRequest(f"page {page} of group {group} is still in the block table; release the sequence instead")


def _check_computed(model: Model, sequence: OpenSequence, computed_tokens: int, dead_blocks: tuple[int, ...]) -> None:
    if dead_blocks and (len(dead_blocks) != len(model.layout.window_groups) or max(dead_blocks) > sequence.blocks):
        raise InvalidRequest(
            f"dead_blocks needs a number up to {sequence.blocks} for each of {len(model.layout.window_groups)} groups "
            f"with a window or states, got {list(dead_blocks)[:8]}"
        )
    if computed_tokens > sequence.blocks * model.layout.block_tokens:
        raise InvalidRequest(
            f"computed_tokens {computed_tokens} is beyond the {sequence.blocks} blocks of sequence {sequence.id}"
        )


def _dead_blocks(model: Model, group: int, computed_tokens: int) -> int:
    """Number of blocks of a sequence that no query from ``computed_tokens`` on looks back to, but for sinks. 0 of
    scratch: how long that is used, the engine says."""
    layout = model.layout
    if layout.groups[group].is_scratch:
        return 0
    return max(0, computed_tokens - layout.window_of(group) + 1) // layout.block_tokens


def release_many(
    core: Core, call: Call, releases: Releases, entries: range, answers: list[int], held: Container[int] = ()
) -> None:
    """``release`` for ``entries``, in order, whose pages are freed together. ``answers`` gets the pages of each; it is
    short where there is no such sequence, it is among ``held``, or it takes more turns than one."""
    sequences, pools, tokens = call.lease.sequences, call.replica.place.pools, releases.output_tokens
    gone = [array("i") for _ in pools]

    def keep(group: int, pages: array[int]) -> None:
        gone[group].extend(pages)

    try:
        for entry in entries:
            number = releases.sequences[entry]
            sequence = sequences.get(number)
            if sequence is None or number in held:
                break
            if not _end(core, call, sequence, Ended(tokens[entry]) if tokens else None, keep):
                break
            del sequences[number]
            answers.append(sequence.freed)
    finally:  # also what a sequence had given that takes another turn, or that broke
        for pool, pages in zip(pools, gone, strict=True):
            if pages:
                pool.move_all(pages, PageState.FREE)
    look_ahead(core, call.model, call.replica)


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
    if not _end(core, call, sequence, end):
        return TURN
    del call.lease.sequences[sequence_id]
    look_ahead(core, call.model, call.replica)
    return sequence.freed


def _end(core: Core, call: Call, sequence: OpenSequence, end: Ended | None, keep: Keep | None = None) -> bool:
    """A turn of a sequence's end; True when it has nothing any more. ``keep``: takes its pages, instead of freeing
    them."""
    if end is not None:
        sequence.tell_end(end)
    if sequence.is_open:
        note_end(core, call.model, sequence.anchor)
        if sequence.window_rows and sequence.anchor != NO_ROW and sequence.retention != RequestHint.ONCE:
            ends = [(group, sequence.windows.last_rows(group, sequence.anchor)) for group in sequence.window_rows]
            back_up_copies(core, call.model, call.replica, [(group, row) for group, rows in ends for row in rows])
    return sequence.end_part(core.turns.pages, keep)
