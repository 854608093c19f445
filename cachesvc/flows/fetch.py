"""Fetch: bring blocks beyond a hit from storage to the host, verified one by one; Match waits for a bounded time.

Nothing of storage fails a call. Whatever came of a fetch, the call goes on with the hit that there is by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cachesvc.flows.core import TURN, Call, Core, Count
from cachesvc.flows.loads import Sharing, bring, loads_of
from cachesvc.flows.make_room import make_host_room, make_room
from cachesvc.flows.stored import came_to_host, note_stored, note_unstored
from cachesvc.flows.transfers import land, may_submit, unstage, wait_for
from cachesvc.ledger.block_ledger import BlockLedger, Hit
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.pins import Keep, Pin, kept
from cachesvc.ledger.retention import window_positions
from cachesvc.ledger.sequences import Prefetch
from cachesvc.ledger.storage_state import Fetch, fetched_pages
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.model.answers import Wait
from cachesvc.model.errors import LimitExceeded, PoolExhausted
from cachesvc.model.numbers import Party
from cachesvc.model.words import DONE, KEY_BYTES, READY, Inward, Urgency
from cachesvc.storage.seam import CAME, Outcome
from cachesvc.storage.tier import News

MOST_BLOCKS = 1024
"""Most blocks of one fetch: 16k tokens in blocks of 16. What lies behind is for the next one, while these are used."""
PEEKED_BLOCKS = 16
"""Blocks of the first fetch of a call, where the presence of the prompt is unknown."""
HOST_SHARE = 2
"""Divisor of the host's pages: one fetch takes no more than this part of them."""


def reach(core: Core, call: Call, keys: bytes, max_blocks: int, hit: Hit, sharing: Sharing) -> Wait | None:
    """Begin (or join) a fetch of what storage has beyond ``hit``; None: the hit is all that there will be.

    Where its contents are unknown, a few blocks are asked for, and all others when these have come: most prompts are
    not there, and pages of the host are taken, and evicted for, before anything comes. What the host cannot hold at a
    time comes in pieces, which go on to the device.
    """
    storage = core.storage
    wanted = len(keys) // KEY_BYTES
    wanted = min(wanted, max_blocks) if max_blocks else wanted
    if storage is None or wanted <= hit.blocks:
        return None
    model = call.model
    left = storage.wait_seconds
    if (fetch := sharing.fetch) is not None:
        left -= call.now - sharing.fetch_since
        is_running = core.ledger.tickets.is_running(fetch.ticket)
        if is_running and not fetch.has_begun and left <= 0:  # a call that does not wait shows nothing
            storage.lagged()
        is_over = sharing.goes_on and not sharing.in_pieces
        if is_running or is_over or not fetch.is_whole or left <= 0:
            return None
        if sharing.in_pieces and (wait := pass_on(core, call, hit, sharing, left)) is not None:
            return wait
    joined = model.stored.fetching.get(keys[hit.blocks * KEY_BYTES : (hit.blocks + 1) * KEY_BYTES])
    if joined is None or not joined.brings(keys, hit.blocks):
        ahead = keys[hit.blocks * KEY_BYTES : (hit.blocks + MOST_BLOCKS) * KEY_BYTES]
        expected = storage.expects(model, ahead)
        if expected == 0 or (fetch is not None and expected is not None and not sharing.in_pieces):
            return None
        if expected is None:
            expected = PEEKED_BLOCKS if fetch is None else len(ahead) // KEY_BYTES
        asked = min(wanted - hit.blocks, expected)
        begun = begin_fetch(core, model, call.replica, call.lease.party, keys, hit, asked)
        if begun is None or isinstance(begun, Wait):
            return begun
        joined = begun
        joined.is_piece = sharing.in_pieces = len(joined.keys) < asked or sharing.in_pieces
    if fetch is None:
        sharing.fetch_since, sharing.fetched_first = call.now, joined.first
    sharing.fetch, sharing.goes_on = joined, fetch is not None
    return Wait((joined.ticket,), left)


def fetched_blocks(hit: Hit, sharing: Sharing) -> int:
    """Number of blocks of a hit that came with the fetches its call waited for, and were not in place before."""
    last = sharing.fetch
    if last is None:
        return min(sharing.arrived, hit.blocks - hit.device_blocks)
    first = sharing.fetched_first if sharing.passed_on else max(hit.device_blocks, sharing.fetched_first)
    return max(0, min(hit.blocks, last.first + last.admitted) - first)


def begin_fetch(
    core: Core,
    model: Model,
    replica: Replica,
    party: Party,
    keys: bytes,
    hit: Hit,
    blocks: int,
    above: Fetch | None = None,
) -> Fetch | Wait | None:
    """Take pages for the ``blocks`` blocks behind a hit, or as many as can be had, and ask for them. ``above``: a fetch
    behind the hit, under way, behind which these come."""
    host = model.blocks.host
    assert core.storage is not None
    most = host.usable_blocks // HOST_SHARE
    blocks = min(blocks, most)
    if blocks <= 0 or len(core.ledger.tickets.running) >= core.limits.running_tickets:
        return None
    is_needed = hit.blocks > hit.device_blocks and host.is_hittable(hit.row)
    on_host = hit.row if is_needed else NO_ROW
    begin = hit.blocks if above is None else above.first + len(above.keys)
    with kept(model.blocks, host, Keep(on_host, _looked_back_to(model.blocks, hit) if is_needed else ())):
        if not make_host_room(core, model, fetched_pages(model.blocks, begin, blocks)):
            return TURN
    while blocks > 0 and host.lacks(fetched_pages(model.blocks, begin, blocks)):
        blocks //= 2
    if blocks <= 0:
        return None
    ticket = core.ledger.tickets.open(model.id, replica.id, Inward.FETCH, Urgency.AWAITED, party=party)
    ticket.moved_blocks = blocks
    ticket.size_bytes = blocks * sum(model.layout.page_bytes(g) * model.layout.host_ranks(g) for g in host.full_groups)
    places = (replica.place, *model.blocks.index.places)  # a pin on the host keeps its copies of the path there
    place = next((each for each in places if hit.row != NO_ROW and each.is_hittable(hit.row)), host)
    first, last = begin * KEY_BYTES, (begin + blocks) * KEY_BYTES
    names = tuple(keys[at : at + KEY_BYTES] for at in range(first, last, KEY_BYTES))
    pin = Pin(model.blocks, place, hit.row if above is None else NO_ROW)
    fetch = Fetch(model.blocks, ticket.id, begin, names, pin, above)
    model.stored.begin(fetch)
    core.count(Count.STORAGE_FETCHES)
    fetch.out = core.storage.fetch(model, ticket.id, keys[first:last], fetch.pages(), fetch.parent)
    return fetch


def _looked_back_to(blocks: BlockLedger, hit: Hit) -> tuple[tuple[int, int], ...]:
    """Windowed copies on the host, ``(group, row)``, without which the hit would be shorter: storage may have no more
    than it brought, and no hit has looked back to these yet."""
    host = blocks.host
    path = blocks.index.path(hit.row) if host.window_groups else ()
    positions = [(g, at) for g in host.window_groups for at in window_positions(blocks.layout, g, hit.blocks)]
    return tuple((group, path[at]) for group, at in positions if host.states[group][path[at]] == READY)


# -- what comes back ---------------------------------------------------------------------------------------------


def fetched(core: Core, model_id: int, ticket: int, objects: Sequence[News]) -> None:
    """Objects of a fetch have ended, or their waits have. What takes more than a turn goes on as a chore."""
    model = core.ledger.models.get(model_id)
    fetch = None if model is None else model.stored.fetches.get(ticket)
    if model is None or fetch is None:
        return
    for each in objects:
        _note(core, model, fetch, each)
    core.begin(model_id, partial(_admit, core, model, fetch))


def _note(core: Core, model: Model, fetch: Fetch, found: News) -> None:
    block, groups, outcome = found.block, found.shape.groups, found.outcome
    if outcome is not Outcome.LATE:
        fetch.has_begun = True
        fetch.came_back(block)
    if outcome is Outcome.LENT:
        fetch.lent.add(block)
    if outcome is None or outcome in CAME or fetch.is_over:
        return
    full = model.blocks.host.full_groups
    if outcome is Outcome.LATE or any(group in full for group in groups):
        fetch.cut(block)
        if outcome is Outcome.MISPLACED:
            core.count(Count.KEYS_MISPLACED)
        else:
            note_unstored(model, fetch.keys[block])
    else:
        for group in groups:
            fetch.lose(block, group)


def _admit(core: Core, model: Model, fetch: Fetch) -> bool:
    """A turn of it; True when nothing more can be done now."""
    if not fetch.is_over:
        left = core.turns.landed
        while left > 0 and fetch.may_admit() and fetch.admit(core.ledger.stamp):
            left -= 1
            _note_admitted(core, model, fetch)
            core.count(Count.STORAGE_FETCHED_BLOCKS)
        if not left and fetch.may_admit():
            return False
        if fetch.admitted < fetch.end:
            return True
        fetch.stop()
        model.stored.end(fetch)
        if core.ledger.tickets.is_running(fetch.ticket):
            core.ledger.tickets.running[fetch.ticket].moved_blocks = fetch.admitted
            end_ticket(core, fetch.ticket)
        for call in fetch.then:
            call()
        for each in fetch.below:
            core.begin(model.id, partial(_admit, core, model, each))
    elif fetch.is_done:
        model.stored.fetches.pop(fetch.ticket, None)
    return True


def end_ticket(core: Core, ticket: int) -> None:
    """End the ticket of a wait for storage: calls that wait go on."""
    ended = land(core, ticket, DONE)
    if ended and core.on_ended is not None:
        core.on_ended(ended)


def _note_admitted(core: Core, model: Model, fetch: Fetch) -> None:
    """The block that a fetch brought last: the storage has it, unless another node lent it."""
    at = fetch.admitted - 1
    fetch.came_at = core.ledger.moment.seconds
    if fetch.is_piece:
        model.stored.land(fetch.keys[at])
    if at not in fetch.lent:
        note_stored(model, fetch.keys[at])
        return
    came_to_host(core, model, [fetch.pin.row])


def pass_on(core: Core, call: Call, hit: Hit, sharing: Sharing, seconds: float) -> Wait | None:
    """Bring what has come of a hit onto the device, and free its pages on the host; None once that is done, or where
    the device has no room (``sharing.in_pieces`` ends then). Waits for ``seconds`` at most."""
    if hit.blocks == hit.device_blocks:
        return _free_host(core, call, sharing)
    model, replica = call.model, call.replica
    held = Prefetch(model.blocks, replica.place, call.lease.prefetches)
    held.hold(hit, core.ledger.stamp())
    try:
        loads = loads_of(core, model, replica, held.rest(), held.sealed, held.hit_blocks)
        if loads.blocked:
            return wait_for(core, loads.blocked)._replace(seconds=seconds)
        if not may_submit(core, model, replica, call.lease.party):
            sharing.in_pieces = False
            return None
        wait = make_room(core, call, loads.pages_wanted(), loads.keep)
        if wait is not None:
            return wait._replace(seconds=seconds) if wait.tickets else wait
        tickets = bring(core, call, held, loads, Urgency.AWAITED)
        sharing.passed_on = hit.blocks
        return Wait(tuple(ticket.id for ticket in tickets), seconds)
    except (PoolExhausted, LimitExceeded):
        sharing.in_pieces = False
        return None
    finally:
        if not held.loads:
            held.let_go()


def _free_host(core: Core, call: Call, sharing: Sharing) -> Wait | None:
    """Free host pages of the piece that is on the device; a turn's worth."""
    fetch, model = sharing.fetch, call.model
    assert fetch is not None, "a piece has come"
    left = core.turns.evicted
    for key in reversed(fetch.keys[: fetch.admitted]):
        left -= unstage(model, key)
        if left <= 0:
            return TURN
    return None
