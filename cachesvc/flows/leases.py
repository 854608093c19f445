"""Leases: opened, kept, lost, closed; and what becomes of the pages of an engine that is gone or only silent."""

from __future__ import annotations

from array import array
from functools import partial

from cachesvc.flows.call import Call
from cachesvc.flows.core import Core
from cachesvc.flows.counters import LEASES_ENDED, Count
from cachesvc.flows.turns import TURN, begin
from cachesvc.ledger.leases import Lease, LeaseEnd, LeaseState, Process
from cachesvc.ledger.ledger import Model
from cachesvc.model.answers import Wait
from cachesvc.model.errors import DaemonDraining, InvalidRequest, KeyReused, LedgerBroken, LimitExceeded, NotFound
from cachesvc.model.words import PageState

LONGEST_PAUSE_MS = 1000
"""An engine that forgets to take its word back holds up the others' backups no longer."""


def process_arrived(core: Core, token: bytes, pid: int, uid: int, gids: frozenset[int] = frozenset()) -> None:
    """A process opened its life connection."""
    core.ledger.processes[token] = Process(token, pid, uid, gids)


def process_holds(core: Core, token: bytes) -> bool:
    """True while leases depend on the process."""
    process = core.ledger.processes.get(token)
    return process is not None and bool(process.leases)


def process_gone(core: Core, token: bytes) -> None:
    """The kernel says that a process has ended: its leases are lost, and pages come back where it was the last."""
    process = core.ledger.processes.pop(token, None)
    if process is None:
        return
    for lease_id in sorted(process.leases):
        lease = core.ledger.leases.get(lease_id)
        if lease is None:
            continue
        lease.processes.discard(token)
        lease.attached.pop(token, None)
        if lease.state is LeaseState.LIVE:
            lose(core, lease, "its process ended", LeaseEnd.PROCESS_ENDED)
        elif not lease.processes:
            free_quarantine(core, lease)


def open_lease(
    core: Core, model_id: int, replica_id: int, engine: str, token: bytes, request_id: int, now: float
) -> Lease:
    """A new lease for the process behind ``token``; the same token and request_id (not 0) give the same lease.

    Raises KeyReused, NotFound (model, replica, process), LimitExceeded, DaemonDraining, Unavailable (the model is out
    of service).
    """
    process = _process(core, token)
    for lease_id in process.leases if request_id else ():
        known = core.ledger.leases.get(lease_id)
        if known is not None and known.opened_by == (token, request_id) and known.state is LeaseState.LIVE:
            if (known.model, known.replica) != (model_id, replica_id):
                raise KeyReused(request_id)
            return known
    if core.ledger.draining:
        raise DaemonDraining("the daemon is draining and opens no new leases; go on without the cache")
    if len(core.ledger.leases) >= core.limits.leases:
        raise LimitExceeded("leases", len(core.ledger.leases) + 1, core.limits.leases)
    model = core.ledger.model(model_id)
    model.require_trusted()
    model.replica(replica_id)
    lease = Lease(core.new_name(), engine[:128], model_id, replica_id, now, len(model.layout.groups))
    lease.opened_by = (token, request_id)
    _bind(lease, process)
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
        if token != lease.opened_by[0]:
            _unbind(core, lease, token)
            if not lease.processes and lease.state is LeaseState.QUARANTINED:
                free_quarantine(core, lease)


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


def close_lease(core: Core, lease_id: str, *, quiesced: bool) -> Wait | None:
    """End a lease, or quiesce one that was lost: with ``quiesced`` its pages have come back when it answers. Closing
    twice is fine."""
    lease = core.ledger.leases.get(lease_id)
    if lease is None:
        if lease_id not in core.ledger.lost:
            raise NotFound("lease", lease_id, "open one first")
        return None
    if lease.state is LeaseState.LIVE:
        lose(core, lease, "it was closed", LeaseEnd.CLOSED)
    if quiesced and lease_id in core.ledger.leases:  # without a process it is gone already
        free_quarantine(core, lease)
    return TURN if quiesced and lease_id in core.ledger.leases else None


def lose_silent(core: Core, silence_limit_seconds: float, now: float) -> list[str]:
    """Take from every lease that was silent too long what it holds; its private pages wait in quarantine."""
    silent = [
        lease
        for lease in core.ledger.leases.values()
        if lease.state is LeaseState.LIVE and now - lease.last_heard > silence_limit_seconds
    ]
    for lease in silent:
        lose(core, lease, f"silent for more than {silence_limit_seconds:g} s", LeaseEnd.SILENT)
    return [lease.id for lease in silent]


def lose(core: Core, lease: Lease, why: str, cause: LeaseEnd = LeaseEnd.OTHER) -> None:
    """End a live lease: sealed blocks stay, sequences end, private pages go to quarantine. ``cause``: for counting.

    It is lost at once, and what it holds in turns. Where the ledger breaks meanwhile, the model is out of service, and
    other leases are lost as ever.
    """
    lease.state = LeaseState.QUARANTINED
    lease.why = why
    core.count(LEASES_ENDED[cause])
    if cause is not LeaseEnd.CLOSED:
        core.count(Count.LEASES_LOST)
    lease.is_quiet = not lease.processes
    _end_holds(core, lease)


def free_quarantine(core: Core, lease: Lease) -> None:
    """Nothing writes the lease's pages any more: they come back, and the lease is forgotten but for its name."""
    lease.is_quiet = True
    _end_holds(core, lease)


def _end_holds(core: Core, lease: Lease) -> None:
    if not lease.is_ending:
        lease.is_ending = True
        begin(core.chores, lease.model, partial(_end_some, core, lease))


def _end_some(core: Core, lease: Lease) -> bool:
    """A turn of ending what a lost lease has; True when it has no more to give back."""
    model = core.ledger.models[lease.model]
    is_over = None
    while is_over is None:
        try:
            is_over = _end_part(core, lease, model)
        except LedgerBroken as broken:  # what broke is left as it is: it is not served again
            model.distrust(str(broken))
    if is_over:
        lease.is_ending = False
        if lease.is_quiet:
            _forget(core, lease)
    return is_over


def _end_part(core: Core, lease: Lease, model: Model) -> bool:
    """What it may still write is quarantined, unless it is quiet by now; True when all is. Whatever breaks has left the
    lease by then, so the next turn goes on behind it."""
    pools = model.replicas[lease.replica].place.pools

    def give_up(group: int, pages: array[int]) -> None:
        if lease.is_quiet:
            pools[group].move_all(pages, PageState.FREE)
        else:
            lease.set_aside(group, pools[group], pages)

    left = core.turns.pages
    while left > 0 and (lease.prefetches or lease.sequences):
        left -= core.turns.pages // core.turns.holds
        if lease.prefetches:
            held = next(iter(lease.prefetches))
            lease.prefetches.pop(held)
            held.let_go()
            continue
        number, sequence = lease.sequences.popitem()
        before = sequence.freed
        is_over = sequence.end_part(max(1, left), give_up)
        left -= sequence.freed - before
        if not is_over:
            lease.sequences[number] = sequence
            return False
    for group, stock in enumerate(lease.stock):
        some = array("i", [stock.pop() for _ in range(min(len(stock), max(0, left)))])
        give_up(group, some)
        left -= len(some)
    if left <= 0:
        return False
    return not lease.is_quiet or lease.free_quarantine(pools, left)


def _forget(core: Core, lease: Lease) -> None:
    for token in list(lease.processes):
        _unbind(core, lease, token)
    core.ledger.remember_lost(lease.id, lease.why)
    del core.ledger.leases[lease.id]


def _process(core: Core, token: bytes) -> Process:
    process = core.ledger.processes.get(token)
    if process is None:
        raise NotFound("process", token.hex(), "connect to the life socket first and keep the connection open")
    return process


def _bind(lease: Lease, process: Process) -> None:
    lease.processes.add(process.token)
    process.leases.add(lease.id)


def _unbind(core: Core, lease: Lease, token: bytes) -> None:
    lease.processes.discard(token)
    process = core.ledger.processes.get(token)
    if process is not None:
        process.leases.discard(lease.id)
