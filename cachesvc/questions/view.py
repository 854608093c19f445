"""The ledger as one caller may see it: the one place where another tenant's models, leases and tickets are left out.

Questions are asked of a view and never of the ledger, so none can forget whose things it shows.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message

from cachesvc.flows.core import Core
from cachesvc.flows.registration import pool_device_bytes, pool_host_bytes, pool_pages
from cachesvc.ledger.ledger import Lease, LeaseState, Ledger, Model
from cachesvc.ledger.tickets import Ticket
from cachesvc.model.errors import InvalidRequest, NotFound
from cachesvc.model.words import PageState

SHOWN_LETTERS = 12
"""Letters of a lease's id where the whole is not shown: it is the key to the lease."""

MODELS_NAMED = 8


class Sight(NamedTuple):
    """Limits of a caller's view. ``tenant`` None: the things of every tenant. ``whole_ids``: of leases. ``salted``: the
    namespaces and whole lease ids of models whose engines keep a salt of their own."""

    tenant: str | None = None
    whole_ids: bool = True
    salted: bool = True

    @property
    def is_of_all(self) -> bool:
        """True for a caller that may see every namespace anyway."""
        return self.tenant is None and self.salted

    def covers(self, tenant: str) -> bool:
        """True for a tenant whose things are shown."""
        return self.tenant is None or self.tenant == tenant


EVERYTHING = Sight()


class View:
    """Part of a ledger that ``sight`` covers, in its state at each question. ``now()``: seconds, as flows call time."""

    def __init__(self, core: Core, sight: Sight, now: Callable[[], float]) -> None:
        self._core = core
        self.sight = sight
        self.now = now

    # -- models ------------------------------------------------------------------------------------------------

    def models(self) -> list[Model]:
        """Every model, in the order of registration."""
        return [model for model in self._core.ledger.models.values() if self.sight.covers(model.tenant)]

    def model(self, model_id: int) -> Model:
        """A model by number. Raises NotFound."""
        model = self._core.ledger.models.get(model_id)
        if model is None or not self.sight.covers(model.tenant):
            raise NotFound("model", model_id, "ListModels shows those that are there")
        return model

    def is_stored(self, model: Model, key: bytes) -> bool:
        """True where storage believes to have a block, as far as it knows without being asked."""
        storage = self._core.storage
        return storage is not None and storage.has(model, key)

    def model_or_only(self, model_id: int) -> Model | None:
        """A model by number; 0: the only one, or None where there is none. Raises NotFound, InvalidRequest."""
        if model_id:
            return self.model(model_id)
        models = self.models()
        if len(models) > 1:
            named = ", ".join(f"{model.id} ({model.shown})" for model in models[:MODELS_NAMED])
            raise InvalidRequest(f"there are {len(models)} models; name one by model_id: {named}")
        return models[0] if models else None

    def has(self, model: Model) -> bool:
        """False once the model was evicted for another one."""
        return self._core.ledger.models.get(model.id) is model

    def namespace_of(self, model: Model) -> bytes:
        """A model's namespace; empty where it is the secret of the engines that know the salt."""
        return b"" if model.is_salted and not self.sight.salted else model.namespace

    # -- leases ------------------------------------------------------------------------------------------------

    def leases(self) -> list[Lease]:
        """Every lease, in the order of opening."""
        models = self._core.ledger.models
        return [lease for lease in self._core.ledger.leases.values() if self.sight.covers(models[lease.model].tenant)]

    @property
    def live_leases(self) -> int:
        """Leases that were neither closed nor lost."""
        return sum(lease.state is LeaseState.LIVE for lease in self.leases())

    def lease_id(self, lease: Lease) -> str:
        """A lease's id, or how it begins where the whole is not to be seen."""
        is_whole = self.sight.whole_ids and (self.sight.salted or not self._core.ledger.models[lease.model].is_salted)
        return lease.id if is_whole else lease.id[:SHOWN_LETTERS]

    def process_ids(self, lease: Lease) -> tuple[int, ...]:
        processes = self._core.ledger.processes
        return tuple(sorted(processes[token].pid for token in lease.processes if token in processes))

    @property
    def processes(self) -> int:
        """Processes that are connected, of every tenant."""
        return len(self._core.ledger.processes)

    # -- transfers ---------------------------------------------------------------------------------------------

    def running(self) -> list[Ticket]:
        return [ticket for ticket in self._core.ledger.tickets.running.values() if self._shows(ticket)]

    def tickets(self) -> Iterator[Ticket]:
        """Transfers: those that run, then those that ended, the newest first."""
        book = self._core.ledger.tickets
        every = chain(book.running.values(), reversed(book.ended.values()))
        return (ticket for ticket in every if self._shows(ticket))

    def _shows(self, ticket: Ticket) -> bool:
        """A ticket of a removed model shows to callers that see every tenant."""
        model = self._core.ledger.models.get(ticket.model)
        return self.sight.tenant is None if model is None else self.sight.covers(model.tenant)

    # -- the whole ---------------------------------------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        return self._core.ledger.draining

    @property
    def last_access(self) -> int:
        """Number of the newest access, over all models."""
        return self._core.ledger.last_stamp

    @property
    def counters(self) -> Mapping[str, int]:
        """Counts since the start, over all tenants; empty for a caller that does not see them all."""
        return self._core.counters if self.sight.tenant is None else {}

    def ledger_of(self, model: Model) -> Ledger:
        """Ledger that a recount of the model's holders reads; the model came from this view."""
        assert self.sight.covers(model.tenant)
        return self._core.ledger


def require_no_others(core: Core, own: Lease | None, lease_id: str) -> None:
    """Raises NotFound for a lease of another tenant, where ``Ledger.hear`` found ``own``. One that is not known, or is
    lost, passes."""
    if own is None and lease_id in core.ledger.leases:
        raise NotFound("lease", lease_id, "open one first")


def why_lost(core: Core, lease_id: str) -> str | None:
    """Reason why a lease ended of which nothing is left; None where it is unknown, or something is left."""
    return None if lease_id in core.ledger.leases else core.ledger.lost.get(lease_id)


def require_model(core: Core, tenant: str, model_id: int, namespace: bytes) -> None:
    """Raises NotFound for another tenant's model, for one made with a salt where ``namespace`` is not its own, and
    where the caller names another namespace: numbers are given anew after a restart.

    Only clients that registered with the salt know the namespace of such a model.
    """
    model = core.ledger.models.get(model_id)
    if model is None:
        return
    is_named = hmac.compare_digest(namespace, model.namespace) or not (namespace or model.is_salted)
    if model.tenant != tenant or not is_named:
        raise NotFound("model", model_id, "register it first")


def models_named(core: Core, namespace: bytes) -> list[Model]:
    """Models of a namespace, of any tenant: a caller that knows it knows the salt."""
    return [model for model in core.ledger.models.values() if model.namespace == namespace]


def own_ticket(core: Core, tenant: str, ticket_id: int) -> Ticket:
    """A ticket of the tenant. Raises NotFound, for another tenant's too: tickets are numbered through."""
    ticket = core.ledger.tickets.get(ticket_id)
    model = core.ledger.models.get(ticket.model)
    if model is None or model.tenant != tenant:
        raise NotFound("ticket", ticket_id, "it never existed or ended long ago")
    return ticket


# -- how much ----------------------------------------------------------------------------------------------------------


def leases_of(core: Core, tenant: str) -> list[Lease]:
    """Every lease of a tenant, live or lost."""
    ledger = core.ledger
    return [lease for lease in ledger.leases.values() if ledger.models[lease.model].tenant == tenant]


def private_pages(lease: Lease) -> int:
    """Pages that a lease holds for itself: its sequences' own, its stock, its quarantine."""
    own = sum(len(pages) for sequence in lease.sequences.values() for pages in sequence.own)
    return own + sum(map(len, lease.stock)) + len(lease.quarantine)


def private_pages_of(core: Core, tenant: str) -> int:
    """Pages that a tenant's leases hold for themselves, as its pools count them."""
    return sum(
        pool.own_counts[state]
        for model in core.ledger.models.values()
        if model.tenant == tenant
        for replica in model.replicas
        for pool in replica.place.pools
        for state in (PageState.PRIVATE, PageState.QUARANTINED)
    )


def usage(core: Core, tenant: str) -> dict[str, int]:
    """Current use of a tenant, by the names of the quotas."""
    models = [model for model in core.ledger.models.values() if model.tenant == tenant]
    leases = leases_of(core, tenant)
    return {
        "device_bytes": sum(pool_device_bytes(model) for model in models),
        "host_bytes": sum(pool_host_bytes(model) for model in models),
        "models": len(models),
        "pages": sum(map(pool_pages, models)),
        "leases": len(leases),
        "sequences": sum(len(lease.sequences) for lease in leases),
        "private_pages": private_pages_of(core, tenant),
    }


# Questions that take longer than a call may hold the ledger thread: generators that stop where others may go on.
#
# A question yields ``None`` where it may be interrupted, or work that touches nothing of the ledger, whose result is
# sent back to it. Its driver decides how: the daemon in time slices and with a thread for the work, tests at once. What
# was read before a ``yield`` may have changed after it.

LINES_A_STEP = 32
"""Lines that are made in one step: some 0.3 ms of blocks with their copies."""

Row = TypeVar("Row")
Reply = TypeVar("Reply", bound=Message)
Answer = TypeVar("Answer")
Work = Callable[[], Any]
Question = Generator[Work | None, Any, Answer]


def off_loop(work: Callable[[], Answer]) -> Question[Answer]:
    """The result of ``work``, which is not done on the ledger thread."""
    answer: Answer = yield work
    return answer


def listed(
    answer: Callable[..., Reply],
    field: str,
    rows: Sequence[Row],
    line: Callable[[Row], Message | None],
    *,
    step: int = LINES_A_STEP,
    **head: Any,
) -> Question[list[Reply]]:
    """Parts of one answer, which are the answer when merged: its ``head``, then the ``line`` of each row in ``field``,
    ``step`` of them at a time. Rows of which nothing is left have none."""
    parts = [answer(**head)]
    for first in range(0, len(rows), step):
        lines = map(line, rows[first : first + step])
        parts.append(answer(**{field: [each for each in lines if each is not None]}))
        yield None
    return parts


def answer_at_once(question: Question[Answer]) -> Answer:
    """Drive a question to its end without a pause. For tests and tools that own the ledger."""
    result: Any = None
    while True:
        try:
            work = question.send(result)
        except StopIteration as ended:
            answer: Answer = ended.value
            return answer
        result = None if work is None else work()
