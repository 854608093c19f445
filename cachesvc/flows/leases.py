"""Leases: open, join, keep alive, close; and their fate when the processes behind them end.

A lease is one process's, and ends with any process that has mapped its pools. Or it is an instance's, whose processes
open it by the name that they share, whichever comes first: it lives while one of these does, and what a process held
that leaves ends with it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice

from cachesvc.flows.core import NO_MODEL, TURN, Call, Core, Count
from cachesvc.flows.registration import has_opened
from cachesvc.flows.transfers import remember_dropped
from cachesvc.ledger.block_ledger import LostCopies, is_empty
from cachesvc.ledger.ledger import Lease, LeaseEnd, LeaseState, Model, Process, Replica, member_of
from cachesvc.ledger.page_pool import PagePool
from cachesvc.ledger.reuse_stats import Miss
from cachesvc.model.answers import Wait
from cachesvc.model.errors import DaemonDraining, InvalidRequest, KeyReused, LedgerBroken, LimitExceeded, NotFound
from cachesvc.model.numbers import most_of
from cachesvc.model.words import PageState

MOST_MEMBERS = 256
"""Processes that share a lease: ranks and schedulers of one engine."""

LEASES_A_TURN, SEQUENCES_A_TURN = 16, 1024
"""Leases that are lost in one turn, some 3 us each and 20 us for a line in the log; and their sequences, whose pages
that line counts."""

LONGEST_PAUSE_MS = 1000
"""An engine that forgets to take its word back holds up the others' backups no longer."""


def process_arrived(core: Core, token: bytes, pid: int, uid: int, gids: frozenset[int] = frozenset()) -> None:
    """Add a process that has opened its life connection."""
    core.ledger.processes[token] = Process(token, pid, uid, gids)


def process_holds(core: Core, token: bytes) -> bool:
    """True while leases depend on the process."""
    process = core.ledger.processes.get(token)
    return process is not None and bool(process.leases)


def may_map(core: Core, token: bytes, device: str, model: int, replica: int | None, rank: int) -> bool:
    """True where the process has attached this rank of a replica under a lease that lives; of no replica: any rank of
    the model on the device."""
    process = core.ledger.processes.get(token)
    leases = () if process is None else (core.ledger.leases.get(each) for each in process.leases)
    for lease in leases:
        ranks = lease.attached.get(token) if lease is not None and lease.state is LeaseState.LIVE else None
        if lease is None or not ranks or lease.model != model:
            continue
        if replica is None:
            devices = core.ledger.models[model].replica(lease.replica).devices
            if any(devices[each] == device for each in ranks):
                return True
        elif lease.replica == replica and rank in ranks:
            return True
    return False


def process_gone(core: Core, token: bytes) -> None:
    """The kernel says that a process has ended: its leases are lost, but for those that others share, and pages come
    back where it was the last. Of many leases some end in each turn."""
    process = core.ledger.processes.get(token)
    if process is not None:
        leave = partial(_leave_some, core, process, sorted(process.leases, reverse=True))
        if not leave(at_once=True):
            core.later(NO_MODEL, leave, party=process.party)


def _leave_some(core: Core, process: Process, leases: list[str], *, at_once: bool = False) -> bool:
    """A turn of ending what a process had of ``leases``, from the last on; True when that is done, and the process
    forgotten. The first of them has a turn ``at_once``."""
    token = process.token
    sequences = 0
    for _ in range(min(LEASES_A_TURN, len(leases))):
        if sequences > SEQUENCES_A_TURN:
            break
        process.leases.discard(leases[-1])
        lease = core.ledger.leases.get(leases.pop())
        if lease is None:
            continue
        sequences += len(lease.sequences)
        if core.on_left is not None:
            core.on_left(lease)
        lease.processes.discard(token)
        lease.attached.pop(token, None)
        number = lease.members.pop(token, None)
        if lease.state is LeaseState.LIVE and not (lease.instance and lease.members):
            lose(core, lease, "its process ended", LeaseEnd.PROCESS_ENDED, at_once=at_once)
        elif lease.state is LeaseState.LIVE:
            _go_on_without(core, lease, number, at_once=at_once)
        elif not lease.processes:
            free_quarantine(core, lease, at_once=at_once)
        at_once = False
    if not leases:
        leases += sorted(process.leases, reverse=True)  # one that it opened before its end was known here
    if not leases:
        core.ledger.processes.pop(token, None)
    return not leases


def find_lease(
    core: Core, model_id: int, replica_id: int, token: bytes, request_id: int, instance: str = ""
) -> Lease | None:
    """The live lease that is opened again: the same token and request_id (not 0) give the same lease, and so do an
    instance and the uid of the process behind ``token``. Raises KeyReused, NotFound (process)."""
    process = _process(core, token)
    for lease_id in process.leases if request_id else ():
        known = core.ledger.leases.get(lease_id)
        if known is not None and known.opened_by == (token, request_id) and known.state is LeaseState.LIVE:
            if (known.model, known.replica, known.instance) != (model_id, replica_id, instance):
                raise KeyReused(request_id)
            return known
    wanted = (model_id, replica_id, instance, process.uid)
    for lease in core.ledger.leases.values() if instance else ():
        if (lease.model, lease.replica, lease.instance, lease.uid) == wanted and lease.state is LeaseState.LIVE:
            return lease
    return None


def open_lease(
    core: Core,
    model_id: int,
    replica_id: int,
    engine: str,
    token: bytes,
    request_id: int,
    now: float,
    instance: str = "",
    quota: int = 0,
) -> Lease:
    """A lease for the process behind ``token``: the one that ``find_lease`` finds, or a new one. Of an ``instance`` the
    process is a member from now on. ``quota``: of leases of its tenant, 0 where it has none.

    Raises KeyReused, NotFound (model, replica, process), LimitExceeded, DaemonDraining, Unavailable (the model is out
    of service).
    """
    process = _process(core, token)
    lease = find_lease(core, model_id, replica_id, token, request_id, instance)
    if lease is None:
        _require_room(core, process, quota)
        lease = _new_lease(core, model_id, replica_id, engine, process, now)
        lease.opened_by = (token, request_id)
        lease.instance = instance
    elif lease.instance and len(lease.members) >= MOST_MEMBERS and token not in lease.members:
        raise LimitExceeded("processes of a lease", len(lease.members) + 1, MOST_MEMBERS)
    if token not in lease.members:
        lease.members[token] = lease.joined
        lease.joined += 1
        _bind(lease, process)
        has_opened(core.ledger.models[lease.model])
    lease.heard(now)
    return lease


def _require_room(core: Core, process: Process, quota: int) -> None:
    """A process has its share of all leases while others are connected or hold some, unless its tenant has a quota.
    Alone it may take all: a process without a lease gets its first one beyond the limit, up to a quarter more.

    Raises LimitExceeded.
    """
    ledger, limit = core.ledger, core.limits.leases
    held = Counter(each.party for each in ledger.leases.values())
    own, most = held[process.party], limit if held[process.party] else limit + max(1, limit // 4)
    if len(ledger.leases) >= most:
        raise LimitExceeded.of_setting("leases", len(ledger.leases) + 1, most, "leases", "close some")
    is_alone = all(each.party == process.party for each in ledger.processes.values()) and held.total() == own
    if not quota and not is_alone and own >= (share := most_of(process.party, held, limit)):
        raise LimitExceeded("leases of this process", own + 1, share)


def _new_lease(core: Core, model_id: int, replica_id: int, engine: str, process: Process, now: float) -> Lease:
    if core.ledger.draining:
        raise DaemonDraining("the daemon is draining and opens no new leases; go on without the cache")
    model = core.ledger.model(model_id)
    model.require_trusted()
    model.replica(replica_id)
    if not any(each.model == model_id for each in core.ledger.leases.values()):
        model.blocks.clock.begin_anew()
    lease = Lease(core.new_name(), engine[:128], model_id, replica_id, now, len(model.layout.groups), uid=process.uid)
    lease.party = process.party
    lease.blocks_per_sequence = core.limits.blocks_per_sequence
    core.ledger.leases[lease.id] = lease
    model.last_used = now
    return lease


def attach(core: Core, call: Call, rank: int, token: bytes) -> None:
    """Let the process behind ``token`` map one rank's pools. Raises InvalidRequest (rank), NotFound (process)."""
    lease, model = call.lease, call.model
    if not 0 <= rank < model.layout.ranks:
        raise InvalidRequest(f"rank {rank} is out of range; the model was registered with {model.layout.ranks} ranks")
    process = _process(core, token)
    _bind(lease, process)
    lease.attached.setdefault(token, set()).add(rank)


def detach(core: Core, lease_id: str, rank: int, token: bytes) -> None:
    """The process has unmapped a rank's pools; it no longer counts as a writer when that was its last one."""
    lease = core.ledger.leases.get(lease_id)
    if lease is None:
        return
    ranks = lease.attached.get(token)
    if ranks is None:
        return
    ranks.discard(rank)
    if not ranks:
        del lease.attached[token]
        if token not in lease.members and token != lease.opened_by[0]:
            unbind(core, lease, token)
            if not lease.processes and lease.state is LeaseState.QUARANTINED:
                free_quarantine(core, lease)
        free_unwritten(core, lease)


def pause_write_backs(core: Core, call: Call, milliseconds: int) -> None:
    """Copy no backups off the lease's replica for a while: its engine says that its decode is being hurt.

    Raises InvalidRequest (too long at a time).
    """
    if not 0 <= milliseconds <= LONGEST_PAUSE_MS:
        raise InvalidRequest(
            f"write-backs pause for at most {LONGEST_PAUSE_MS} ms at a time, not {milliseconds}; tell it again instead"
        )
    core.mover.pause_write_backs(call.replica.devices, milliseconds / 1000)
    core.count(Count.WRITE_BACK_PAUSES)


def close_lease(core: Core, lease_id: str, *, quiesced: bool, token: bytes = b"") -> Wait | None:
    """End a lease, or quiesce one that was lost: with ``quiesced`` its pages have come back when it answers. With the
    ``token`` of a process it is that process alone that leaves, and says that nothing of its own writes any more: the
    lease ends with the last. Closing twice is fine."""
    lease = core.ledger.leases.get(lease_id)
    if lease is None:
        if lease_id not in core.ledger.lost:
            raise NotFound("lease", lease_id, "open one first")
        return None
    if token and lease.instance:
        return _leave(core, lease, token, quiesced=quiesced)
    if lease.state is LeaseState.LIVE:
        lose(core, lease, "it was closed", LeaseEnd.CLOSED)
    if quiesced and lease_id in core.ledger.leases:  # without a process it is gone already
        free_quarantine(core, lease)
    return TURN if quiesced and lease_id in core.ledger.leases else None


def _leave(core: Core, lease: Lease, token: bytes, *, quiesced: bool) -> Wait | None:
    """Remove one process of an instance. Pages that the other processes may still write wait for them."""
    if quiesced:
        lease.attached.pop(token, None)
        unbind(core, lease, token)
    number = lease.members.pop(token, None)
    if lease.state is LeaseState.LIVE and not lease.members:
        lose(core, lease, "it was closed", LeaseEnd.CLOSED)
    elif lease.state is LeaseState.LIVE:
        _go_on_without(core, lease, number)
    elif not lease.processes and not lease.is_quiet:
        free_quarantine(core, lease)
    return TURN if quiesced and lease.is_quiet and lease.id in core.ledger.leases else None


def _go_on_without(core: Core, lease: Lease, number: int | None, *, at_once: bool = True) -> None:
    """A process has left a lease that lives on with others; ``number``: as a member, whose sequences end, and whose
    stock goes back."""
    if number is not None:
        mine = [sequence for sequence in lease.sequences if member_of(sequence) == number]
        go_on = partial(_end_left, core, lease, number, mine)
        core.begin(lease.model, go_on, at_once=at_once, party=lease.party)
    free_unwritten(core, lease, at_once=at_once and number is None)


def lose_silent(core: Core, silence_limit_seconds: float, now: float) -> list[str]:
    """Take from every lease that was silent too long what it holds; its private pages wait in quarantine. Where there
    are many, ``LEASES_A_TURN`` of them are lost, and a caller asks again."""
    silent = (
        lease
        for lease in core.ledger.leases.values()
        if lease.state is LeaseState.LIVE and now - lease.last_heard > silence_limit_seconds
    )
    some = list(islice(silent, LEASES_A_TURN))
    for nth, lease in enumerate(some):
        lose(core, lease, f"silent for more than {silence_limit_seconds:g} s", LeaseEnd.SILENT, at_once=nth == 0)
    return [lease.id for lease in some]


def _process(core: Core, token: bytes) -> Process:
    process = core.ledger.processes.get(token)
    if process is None:
        raise NotFound("process", token.hex(), "connect to the life socket first and keep the connection open")
    return process


def _bind(lease: Lease, process: Process) -> None:
    lease.processes.add(process.token)
    process.leases.add(lease.id)


# Incremental teardown of a lease, or of one process of a shared lease.
#
# Pages that a process may still write go to quarantine, and are free once none can.

MOST_QUARANTINED = 0.5
"""Pages in quarantine of a lease that lives on, as a part of its replica's largest pool."""


def lose(core: Core, lease: Lease, why: str, cause: LeaseEnd = LeaseEnd.OTHER, *, at_once: bool = True) -> None:
    """End a live lease: sealed blocks stay, sequences end, private pages go to quarantine. ``cause``: for counting.

    It is lost at once, and what it holds in turns, the first of them ``at_once``: a flow that ends many leases has one
    such turn. Where the ledger breaks meanwhile, the model is out of service, and other leases are lost as ever.
    """
    lease.state = LeaseState.QUARANTINED
    lease.why = why
    lease.members.clear()
    core.count(Count(f"leases_ended_{cause.value}"))
    if cause is not LeaseEnd.CLOSED:
        core.count(Count.LEASES_LOST)
    lease.is_quiet = not lease.processes
    if lease.room is not None:
        lease.room.release()
    _end_holds(core, lease, at_once=at_once)


def free_quarantine(core: Core, lease: Lease, *, at_once: bool = True) -> None:
    """Free the quarantined pages of a lost lease that no process can write any more; of the lease only its name
    stays."""
    lease.is_quiet = True
    _end_holds(core, lease, at_once=at_once)


def free_unwritten(core: Core, lease: Lease, *, at_once: bool = True) -> None:
    """A process has unmapped the pools of a live lease, or is gone: where it was the last that had, pages in quarantine
    come back."""
    if lease.state is LeaseState.LIVE and lease.quarantine and not lease.attached:
        core.begin(lease.model, partial(_free_some, core, lease), at_once=at_once, party=lease.party)


def unbind(core: Core, lease: Lease, token: bytes) -> None:
    lease.processes.discard(token)
    process = core.ledger.processes.get(token)
    if process is not None:
        process.leases.discard(lease.id)


def _end_holds(core: Core, lease: Lease, *, at_once: bool) -> None:
    if not lease.is_ending:
        lease.is_ending = True
        core.begin(lease.model, partial(_end_some, core, lease), at_once=at_once, party=lease.party)


def _end_some(core: Core, lease: Lease) -> bool:
    """A turn of ending what a lost lease has; True when it has no more to give back."""
    model = core.ledger.models[lease.model]
    is_over = None
    while is_over is None:
        try:
            is_over = _end_part(core, lease, model)
        except LedgerBroken as broken:  # a broken sequence stays: it is not served again
            model.distrust(str(broken))
    if is_over:
        lease.is_ending = False
        if lease.is_quiet:
            _forget(core, lease)
    return is_over


def _end_left(core: Core, lease: Lease, number: int, mine: list[int]) -> bool:
    """A turn of ending what a process had that has left; True when that is done, or the lease ends whole."""
    if lease.state is not LeaseState.LIVE:
        return True
    model = core.ledger.models[lease.model]
    while True:
        try:
            left = _end_sequences(core, lease, model, core.turns.pages, mine)
            if left > 0 and not mine and lease.stocked_by == number:
                left = _end_stock(lease, model, left)
            if left > 0:
                free_unwritten(core, lease)
                _bound_quarantine(core, lease, model)
            return left > 0
        except LedgerBroken as broken:
            model.distrust(str(broken))


def _bound_quarantine(core: Core, lease: Lease, model: Model) -> None:
    """End an instance whose processes come and go while others have its pools mapped, once what they left takes too
    much of a pool: its engines open a lease anew, and their pages come back when they have stopped writing."""
    largest = max(pool.capacity for pool in _pools(lease, model))
    if len(lease.quarantine) > largest * MOST_QUARANTINED:
        lose(
            core,
            lease,
            f"processes that have left it kept {len(lease.quarantine)} pages from use; open it anew",
            at_once=False,
        )


def _end_part(core: Core, lease: Lease, model: Model) -> bool:
    """End a part of the lease. Pages that it may still write are quarantined, unless it is quiet by now; True when all
    has ended. A part that broke has left the lease by then, so the next turn goes on behind it."""
    left = core.turns.pages
    while left > 0 and lease.prefetches:
        left -= core.turns.pages // core.turns.holds
        held = next(iter(lease.prefetches))
        lease.prefetches.pop(held)
        held.let_go()
    left = _end_sequences(core, lease, model, left, None)
    left = _end_stock(lease, model, left)
    if left <= 0:
        return False
    return not lease.is_quiet or lease.free_quarantine(_pools(lease, model), left)


def _end_sequences(core: Core, lease: Lease, model: Model, left: int, mine: list[int] | None) -> int:
    """End sequences, all or ``mine``, as far as ``left`` pages go; returns what is left of these, 0 or less where more
    are to be ended."""
    while left > 0 and (lease.sequences if mine is None else mine):
        left -= core.turns.pages // core.turns.holds
        number = next(reversed(lease.sequences)) if mine is None else mine.pop()
        sequence = lease.sequences.pop(number, None)
        if sequence is None:
            continue
        before = sequence.freed
        is_over = sequence.end_part(max(1, left), lambda group, pages: _give_up(lease, model, group, pages))
        left -= sequence.freed - before
        if not is_over:
            lease.sequences[number] = sequence
            if mine is not None:
                mine.append(number)
            return 0
    return left


def _end_stock(lease: Lease, model: Model, left: int) -> int:
    """Give the stock up as far as ``left`` pages go; returns what is left of these."""
    if lease.room is not None:
        lease.room.release()
    for group, stock in enumerate(lease.stock):
        some = array("i", [stock.pop() for _ in range(min(len(stock), max(0, left)))])
        _give_up(lease, model, group, some)
        left -= len(some)
    return left


def _give_up(lease: Lease, model: Model, group: int, pages: array[int]) -> None:
    pool = _pools(lease, model)[group]
    if lease.is_unwritten:
        pool.move_all(pages, PageState.FREE)
    else:
        lease.set_aside(group, pool, pages)


def _free_some(core: Core, lease: Lease) -> bool:
    """A turn of freeing what no process of a live lease can write; True when all is."""
    if lease.state is not LeaseState.LIVE:
        return True
    return lease.free_quarantine(_pools(lease, core.ledger.models[lease.model]), core.turns.pages)


def _pools(lease: Lease, model: Model) -> Sequence[PagePool]:
    return model.any_replica(lease.replica).place.pools


# Handles the loss of device memory when its mover process dies: replicas there are lost, and nothing else.
#
# From the moment of the loss no flow sees a lost replica or its copies: they are none of ``Model.replicas`` and
# ``BlockIndex.places``. Its leases end, so that engines learn of it with their next call; an engine that registers
# again gets a new replica, with a number of its own. The journal reports the end of each of its copies, in turns.
# Copies on the host and on other replicas stay.


def _forget(core: Core, lease: Lease) -> None:
    for token in list(lease.processes):
        unbind(core, lease, token)
    core.ledger.remember_lost(lease.id, lease.why)
    del core.ledger.leases[lease.id]


def lose_device(core: Core, device: str, why: str) -> list[str]:
    """The slabs of a device do not exist any more; returns the leases that are lost by it. Transfers of the device have
    ended, or their ends are on their way."""
    lost: list[tuple[Model, Replica]] = []
    for model in core.ledger.models.values():
        for replica in [each for each in model.replicas if device in each.devices]:
            model.lose(replica, f"device {device} lost its memory ({why})")
            core.count(Count.PINS_ENDED_EARLY, len(model.pins.leave(replica.place)))
            lost.append((model, replica))
    ended = [lease for model, replica in lost for lease in _end_leases(core, model, replica)]
    empty_lost(core)
    return ended


def empty_lost(core: Core) -> None:
    """Begin to forget what lost replicas had, as far as nothing moves or holds it; a replica is forgotten with the
    last of it."""
    for model in core.ledger.models.values():
        for replica in list(model.lost):
            key = _forget_some, model.id, replica.id
            if key not in core.busy and not _forget_lost(core, model, replica):
                forget = partial(_forget_some, core, model, replica, LostCopies(model.blocks, replica.place))
                core.later_once(key, model.id, forget)


def _end_leases(core: Core, model: Model, replica: Replica) -> Iterable[str]:
    """End the leases of a lost replica. No process can write its pages: they need no quarantine."""
    at_once = True
    for lease in list(core.ledger.leases.values()):
        if (lease.model, lease.replica) != (model.id, replica.id):
            continue
        if lease.state is LeaseState.LIVE:
            lose(core, lease, f"{replica.gone}; register again", at_once=at_once)
            yield lease.id
        if lease.id in core.ledger.leases:
            free_quarantine(core, lease, at_once=at_once)
        at_once = False


def _forget_some(core: Core, model: Model, replica: Replica, copies: LostCopies) -> bool:
    """A turn of forgetting copies; True when no more can go now."""
    if core.ledger.models.get(model.id) is not model:
        return True
    is_over = copies.forget_some(core.turns.landed)
    remember_dropped(core, model, Miss.LOST)
    if is_over:
        _forget_lost(core, model, replica)
    return is_over


def _forget_lost(core: Core, model: Model, replica: Replica) -> bool:
    """Forget a lost replica; False where something of it is left, or under way."""
    leases, tickets = core.ledger.leases.values(), core.ledger.tickets
    is_held = any((lease.model, lease.replica) == (model.id, replica.id) for lease in leases)
    if is_held or not is_empty(replica.place) or tickets.touches(model.id, replica.id):
        return False
    model.forget(replica)
    return True
