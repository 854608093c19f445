"""Expect: follow what another node computes for a request here, and fetch each block once it is sealed there.

    asking ── lent ──▶ fetching ── admitted ──▶ fetching ... until all is here
       │                  └── asking for what lies behind
       └── absent, given up, silent, restarted, refused: over; the request has what came by then, and computes the rest

A question waits on the other node until there is something to lend, so a sealed block is on its way at once. The next
question is under way while blocks are, and what it finds is fetched behind them: streams do not stand still between two
loans.
Matches keep an expectation alive; without one for a while, or once one says that its request has ended, nothing is
asked or fetched for it any more.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from functools import partial

from cachesvc.flows.core import EXPECTATIONS_ENDED, Call, Core, Count, Promise
from cachesvc.flows.fetch import begin_fetch, end_ticket
from cachesvc.flows.loads import Sharing
from cachesvc.ledger.block_ledger import Hit
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.storage_state import Expectation, Fetch, key_at
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.model.answers import LONGEST_EXPECTED_WAIT_SECONDS, Expected, Wait
from cachesvc.model.errors import KeyMisplaced
from cachesvc.model.numbers import Party, most_of
from cachesvc.model.text import parse_address
from cachesvc.model.words import FILLING, KEY_BYTES, MOST_KEYS, Inward, Urgency

MOST_EXPECTATIONS = 256
"""Most expectations of a model under way that processes share."""
MOST_KEY_BYTES = 64 << 20
"""Most bytes of keys of these, two million blocks."""
FLOOR_EXPECTATIONS = 16
"""Expectations that a process may have under way whatever others have."""
FLOOR_KEY_BYTES = MOST_KEYS * KEY_BYTES
"""Most bytes of keys of these: the longest prompt."""
FLOORS = 2
"""The most that all processes have, floors included, in multiples of what they share. As many are remembered."""
MOST_PATIENCE_SECONDS = 600.0
ASKED_BLOCKS = 1024
"""Blocks of one question, as many as one loan has."""
POLL_SECONDS = 2.0
"""Time that a question waits on the other node for something to lend, seconds."""
PAUSE_SECONDS = 0.1
"""Pause after a question without use, seconds."""
FAILED_PAUSE_SECONDS = 0.3
"""Pause after a question without an answer or a fetch that brought nothing, seconds: longer than a peer is left alone
after one failure.
"""
LONGEST_PAUSE_SECONDS = 2.0
"""Longest time for which an expectation waits until a peer is asked that has failed, seconds. One that is left alone
for longer has failed several times in a row: what it has computed is done without.
"""
LOOK_SECONDS = 1.0
"""Longest wait of such a call until it looks again, seconds."""
IDLE_SECONDS = 5.0
"""Time without a Match after which an expectation is given up, seconds."""
RELEASED_SECONDS = 2.0
"""The same where the sequences of its Matches have been released: their requests have ended, or match again soon."""
KEEP_SECONDS = 10.0
"""Time for which an ended expectation is not begun again, seconds."""
MOST_FETCHES = 3
"""Fetches of an expectation that are under way at a time, each of what was sealed while the one before began."""
MOST_BESIDE = 8
"""Fetches of a model's expectations under way from which on each has one at a time: all streams are busy then."""
SILENT_SECONDS = 1.0
"""Time between the last block and the end of a fetch after which it had come to a standstill, seconds."""
MOST_FAILURES = 2
"""Questions without an answer after which a peer that has computed all is done without."""


class ExpectationEnd(StrEnum):
    ARRIVED = "arrived"
    SILENT = "silent"  # no progress for as long as the caller is patient
    ABSENT = "absent"  # the peer has computed it and lacks it: evicted
    GIVEN_UP = "given_up"  # the request that computed it on the peer has ended
    RESTARTED = "restarted"  # the peer lives another life, in which nothing is computed for this node
    UNREACHABLE = "unreachable"
    REFUSED = "refused"  # the peer is none that this node may ask
    FULL = "full"  # the host has no room
    INCOMPLETE = "incomplete"  # what was lent did not come, or makes the hit no longer
    ABANDONED = "abandoned"  # no Match asks for it any more, or its replica is gone
    CROWDED = "crowded"  # not begun: its process has its share, or the daemon all that it can have


NOT_FINAL = (ExpectationEnd.ABANDONED, ExpectationEnd.CROWDED)
"""Ends after which the next Match begins anew: an engine was held up, or has room now."""


def follow(core: Core, call: Call, keys: bytes, max_blocks: int, hit: Hit, sharing: Sharing) -> Wait | None:
    """Begin (or go on) to expect what the call says; ``sharing.coming`` tells what is still on its way. None: the call
    has the hit that there is. Raises InvalidRequest for a peer that is no address."""
    expected = sharing.expected
    assert expected is not None
    sharing.coming, sharing.expectation = 0, None
    path, most = _named(keys, max_blocks, expected)
    parse_address("expected.peer", expected.peer, least_port=1)
    if core.lenders is None or core.storage is None or not most:
        return None
    is_here = most <= hit.blocks
    found = call.model.stored.expectations.get((expected.peer, most, hash(path)))
    known = found
    if not is_here and (found is None or found.end in NOT_FINAL):  # a call that waits looks again: without a copy
        known = _begin(core, call, path, most, expected)
    if known is None:
        return None
    known.wanted_at = call.now
    _look(core, call.model, known, call.now)
    if known.end or is_here:
        sharing.arrived, known.arrived = known.arrived, 0  # for the first call that uses them
        return None
    sharing.coming, sharing.expectation = most - hit.blocks, known
    if sharing.expects_since is None:
        sharing.expects_since = call.now
    return _wait(call, known, sharing)


def go_on_waiting(core: Core, call: Call, sharing: Sharing) -> Wait | None:
    """The next wait of a call that has waited for what it expects and whose last block is not here yet: nothing else of
    a long prompt is looked up again. None: look everything up."""
    known = sharing.expectation
    if known is None or known.end or key_at(known.path, known.blocks - 1) in call.model.blocks.index.rows:
        return None
    known.wanted_at = call.now
    _look(core, call.model, known, call.now)
    return _wait(call, known, sharing)


def _wait(call: Call, known: Expectation, sharing: Sharing) -> Wait | None:
    """Wait for an expectation, and look again soon; None where it has ended, or the caller does not wait any longer."""
    assert sharing.expected is not None
    assert sharing.expects_since is not None
    left = sharing.expects_since + LONGEST_EXPECTED_WAIT_SECONDS - call.now
    goes_on = not known.end and sharing.expected.waits and left > 0
    return Wait((known.ticket,), min(LOOK_SECONDS, left)) if goes_on else None


def stop_following(core: Core, call: Call, keys: bytes, max_blocks: int, sharing: Sharing) -> bool:
    """End the expectation of a request that has ended. False where the call does not say so."""
    expected = sharing.expected
    if expected is None or not expected.is_over:
        return False
    path, most = _named(keys, max_blocks, expected)
    known = call.model.stored.expectations.get((expected.peer, most, hash(path)))
    if known is not None and not known.end:
        _abandon(core, call.model, known)
    return True


def _named(keys: bytes, max_blocks: int, expected: Expected) -> tuple[bytes, int]:
    """The packed keys by which a call names its expectation, and how many of the blocks are expected."""
    given = min(len(keys) // KEY_BYTES, max_blocks or 1 << 32)
    return keys[: given * KEY_BYTES], min(given, expected.blocks or given)


def tick_expected(core: Core) -> None:
    """Do periodic work: end what makes no progress or is not wanted, and ask again."""
    now = core.ledger.moment.seconds
    for model in core.ledger.models.values():
        for known in list(model.stored.expectations.values()):
            if known.end and now - known.wanted_at > KEEP_SECONDS:
                del model.stored.expectations[known.name]
            elif not known.end and now - known.wanted_at > (IDLE_SECONDS if known.wanted_by else RELEASED_SECONDS):
                _abandon(core, model, known)
            else:
                _look(core, model, known, now)


def _begin(core: Core, call: Call, path: bytes, blocks: int, expected: Expected) -> Expectation:
    """A new expectation of the first ``blocks`` of packed keys. It has ended where there are too many."""
    all_known = call.model.stored.expectations
    party, tickets = call.lease.party, core.ledger.tickets
    patience = min(expected.patience, MOST_PATIENCE_SECONDS)
    known = Expectation(
        path, blocks, expected.peer, patience, expected.is_computed, 0, call.replica.id, party, call.now, call.now
    )
    all_known.pop(known.name, None)
    if not _has_share(call.model, party, len(path)) or len(tickets.running) >= core.limits.running_tickets:
        known.forget(ExpectationEnd.CROWDED.value)
        core.count(Count.EXPECTATIONS_REFUSED)
    else:
        ticket = tickets.open(call.model.id, call.replica.id, Inward.FETCH, Urgency.AWAITED, party=party)
        known.ticket = ticket.id
        core.count(Count.EXPECTATIONS)
    ended = next((each for each in all_known.values() if each.end), None)
    if ended is not None and len(all_known) >= FLOORS * MOST_EXPECTATIONS:
        del all_known[ended.name]
    if len(all_known) < FLOORS * MOST_EXPECTATIONS:
        all_known[known.name] = known
    return known


def _has_share(model: Model, party: Party, key_bytes: int) -> bool:
    """True where a process may expect one more prompt, of ``key_bytes`` of keys."""
    under_way = [each for each in model.stored.expectations.values() if not each.end]
    held = Counter(each.party for each in under_way)
    held_bytes = Counter[Party]()
    for each in under_way:
        held_bytes[each.party] += len(each.path)
    will_have, all_have = held_bytes[party] + key_bytes, held_bytes.total() + key_bytes
    if held[party] < FLOOR_EXPECTATIONS and will_have <= FLOOR_KEY_BYTES:
        return held.total() < FLOORS * MOST_EXPECTATIONS and all_have <= FLOORS * MOST_KEY_BYTES
    return (
        held.total() < MOST_EXPECTATIONS
        and held[party] < most_of(party, held, MOST_EXPECTATIONS)
        and all_have <= MOST_KEY_BYTES
        and will_have <= most_of(party, held_bytes, MOST_KEY_BYTES)
    )


def _look(core: Core, model: Model, known: Expectation, now: float) -> None:
    """End it where nothing came for too long; ask where a question is due."""
    if known.end:
        return
    if now - known.progress_at >= known.patience:
        _end(core, model, known, ExpectationEnd.SILENT)
    elif known.asked_at is None and not known.lent[1] and now >= known.retry_at:
        _ask(core, model, known)


def _ask(core: Core, model: Model, known: Expectation) -> None:
    """Ask for what is neither here nor on its way."""
    now = core.ledger.moment.seconds
    replica = _replica_of(model, known)
    hit = None if replica is None else _hit(model, replica, known)
    if replica is None or hit is None or core.lenders is None:
        _end(core, model, known, ExpectationEnd.ABANDONED)
        return
    if hit.blocks > known.here and not known.fetching:
        known.here, known.progress_at = hit.blocks, now if hit.blocks else known.progress_at
    if hit.blocks >= known.blocks and not known.fetching:
        _end(core, model, known, ExpectationEnd.ARRIVED)
        return
    first = max(hit.blocks, known.fetching)
    if first >= known.blocks:
        return
    if core.lenders.is_here(known.peer):
        known.retry_at = now + PAUSE_SECONDS
        if known.is_computed and not _comes_here(model, replica, key_at(known.path, first)):  # evicted, or never sealed
            _end(core, model, known, ExpectationEnd.ABSENT)
        return
    keys = known.path[first * KEY_BYTES : (first + ASKED_BLOCKS) * KEY_BYTES]
    known.asked_at = now
    seconds = max(0.0, min(POLL_SECONDS, known.progress_at + known.patience - now))
    answered = partial(_answered, core, model, known, first, now)
    refused = core.lenders.ask(model, known.party, keys, known.peer, seconds, answered)
    if refused:
        _end(core, model, known, ExpectationEnd.REFUSED)


def _comes_here(model: Model, replica: Replica, key: bytes) -> bool:
    """True for a block of this node that an engine computes, or that is being copied to where the replica finds it."""
    if key in model.blocks.computing:
        return True
    row = model.blocks.index.rows.get(key, NO_ROW)
    places = model.blocks.host, replica.place
    return row != NO_ROW and any(place.states[place.lead][row] == FILLING for place in places)


def _answered(core: Core, model: Model, known: Expectation, first: int, asked_at: float, promise: Promise) -> None:
    """Handle the answer to a question of ``asked_at`` for the blocks from ``first`` on."""
    if known.end or known.asked_at != asked_at:
        return
    known.asked_at = None
    now = core.ledger.moment.seconds
    if promise.ask_in:  # it was not asked, which is no question without an answer
        known.retry_at = now + promise.ask_in
        if known.is_computed and promise.ask_in > LONGEST_PAUSE_SECONDS and not known.fetching:
            _end(core, model, known, ExpectationEnd.UNREACHABLE)
        return
    if promise.problem:
        known.failures += 1
        known.retry_at = now + FAILED_PAUSE_SECONDS
        if known.is_computed and known.failures >= MOST_FAILURES and not known.fetching:
            _end(core, model, known, ExpectationEnd.UNREACHABLE)
        return
    if known.epoch not in (0, promise.epoch):
        _end(core, model, known, ExpectationEnd.RESTARTED)
        return
    known.epoch = promise.epoch
    if promise.computing and not known.has_begun:
        known.has_begun, known.progress_at = True, now
    if promise.lent:
        known.lent = first, first + promise.lent
        _go_on(core, model, known)
        return
    known.failures = 0
    if promise.is_given_up and not known.fetching:
        _end(core, model, known, ExpectationEnd.GIVEN_UP)
    elif known.is_computed and not promise.computing and not known.fetching:
        _end(core, model, known, ExpectationEnd.ABSENT)
    elif now - asked_at >= POLL_SECONDS / 2:  # the peer has waited; one that answers at once is asked less often
        _ask(core, model, known)
    else:
        known.retry_at = now + PAUSE_SECONDS


def _go_on(core: Core, model: Model, known: Expectation) -> None:
    """Begin to fetch what is lent, behind what is on its way, unless too much is."""
    if known.lent[1] and not known.is_beginning and (not known.fetches or _may_go_beside(model, known)):
        known.is_beginning = True
        core.begin(model.id, partial(_take, core, model, known))


def _may_go_beside(model: Model, known: Expectation) -> bool:
    """True where what is lent comes behind the last fetch under way, and may come at the same time."""
    if len(known.fetches) >= MOST_FETCHES or not known.fetches[-1].leads_to(known.path, known.lent[0]):
        return False
    return sum(len(each.fetches) for each in model.stored.expectations.values()) < MOST_BESIDE


def _take(core: Core, model: Model, known: Expectation) -> bool:
    """A turn of beginning to fetch what is lent; True when it has begun, or does not."""
    first, last = known.lent
    if not last:  # a fetch before it brought nothing
        known.is_beginning = False
        return True
    replica = None if known.end else _replica_of(model, known)
    hit = None if replica is None else _hit(model, replica, known)
    above = known.fetches[-1] if known.fetches else None
    if hit is not None and above is None:
        is_behind, start = hit.blocks >= first, hit.blocks
    else:
        is_behind, start = above is not None and above.leads_to(known.path, first), first
    if replica is None or hit is None or not is_behind:  # the fetch before it brought less
        known.is_beginning, known.lent = False, (0, 0)
        _ask_again(core, model, known)
        return True
    path = known.path
    fetch = model.stored.fetching.get(key_at(path, start)) if start < last else None
    if start < last and (fetch is None or not fetch.brings(path, start)):
        begun = begin_fetch(core, model, replica, known.party, path, hit, last - start, above)
        if isinstance(begun, Wait):
            return False
        if begun is None:
            known.is_beginning = False
            if above is None:
                _end(core, model, known, ExpectationEnd.FULL)
            return True
        fetch = begun
    known.is_beginning, known.lent = False, (0, 0)
    if fetch is not None:
        known.fetches.append(fetch)
        fetch.then.append(partial(_came, core, model, known, fetch))
        _ask_again(core, model, known)
    else:
        _came(core, model, known, None)
    return True


def _came(core: Core, model: Model, known: Expectation, fetch: Fetch | None) -> None:
    """A fetch has ended, or none was needed: go on with what lies behind it."""
    if known.end or not (fetch is None or fetch in known.fetches):
        return
    if fetch is not None:
        known.fetches.remove(fetch)
        if not fetch.is_whole:  # those behind it have nothing to come under
            known.fetches.clear()
    before = known.here
    replica = _replica_of(model, known)
    hit = None if replica is None else _hit(model, replica, known)
    if hit is not None and hit.blocks <= before:  # nothing of it came, or a window ends the hit
        known.failures += 1
        known.fetches.clear()
        known.lent, known.asked_at = (0, 0), None  # what lies behind a gap is of no use
        known.retry_at = core.ledger.moment.seconds + FAILED_PAUSE_SECONDS
        if known.failures >= MOST_FAILURES:
            _end(core, model, known, ExpectationEnd.INCOMPLETE)
        return
    now = core.ledger.moment.seconds
    if fetch is None or fetch.is_whole or now - fetch.came_at < SILENT_SECONDS:
        known.failures = 0
    else:  # it came to a standstill: a peer that sends a little each time is not followed without end
        known.failures += 1
    came = 0 if hit is None else hit.blocks - max(before, 0)
    known.arrived += came
    core.count(Count.EXPECTED_BLOCKS, came)
    if hit is not None:
        known.here, known.progress_at = hit.blocks, now
    if known.failures >= MOST_FAILURES and not known.fetches:
        _end(core, model, known, ExpectationEnd.INCOMPLETE)
        return
    _go_on(core, model, known)
    _ask_again(core, model, known)


def _ask_again(core: Core, model: Model, known: Expectation) -> None:
    """Ask for what lies behind, unless a question is under way or its loan waits for a fetch."""
    if not known.end and known.asked_at is None and not known.lent[1]:
        _ask(core, model, known)


def _end(core: Core, model: Model, known: Expectation, end: ExpectationEnd) -> None:
    """End an expectation; it is remembered for a while."""
    known.forget(end.value)
    core.count(EXPECTATIONS_ENDED.get(end.value, Count.EXPECTATIONS_ENDED_OTHER))
    model.stored.expectations.move_to_end(known.name)
    if core.ledger.tickets.is_running(known.ticket):
        end_ticket(core, known.ticket)


def _abandon(core: Core, model: Model, known: Expectation) -> None:
    """End an expectation that no request has any more, and the fetches under way that are for it alone."""
    first = [fetch.keys[0] for fetch in known.fetches if not _is_shared(model, fetch, known)]
    if known.lent[1]:
        first.append(key_at(known.path, known.lent[0]))
    _end(core, model, known, ExpectationEnd.ABANDONED)
    if first and core.lenders is not None:
        core.lenders.drop(model, first)


def _is_shared(model: Model, fetch: Fetch, known: Expectation) -> bool:
    others = (each for each in model.stored.expectations.values() if each is not known and not each.end)
    return any(fetch in each.fetches for each in others)


def _replica_of(model: Model, known: Expectation) -> Replica | None:
    return next((replica for replica in model.replicas if replica.id == known.replica), None)


def _hit(model: Model, replica: Replica, known: Expectation) -> Hit | None:
    """Longest hit of it here, with what is behind; None where its keys are no chain."""
    try:
        return model.blocks.find(known.path, replica.place)
    except KeyMisplaced:
        return None


__all__ = ["ExpectationEnd", "follow", "stop_following", "tick_expected"]
