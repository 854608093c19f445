"""The ledger as one caller may see it: the one place where another tenant's models, leases and tickets are left out.

Questions are asked of a view and never of the ledger, so none can forget whose things it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from cachesvc.flows.context.core import Core
from cachesvc.ledger.leases import Lease, LeaseState
from cachesvc.ledger.ledger import Ledger, Model
from cachesvc.ledger.tickets import Ticket
from cachesvc.model.errors import InvalidRequest, NotFound

SHOWN_LETTERS = 12
"""Letters of a lease's id where the whole is not shown: it is the key to the lease."""

MODELS_NAMED = 8

Line = TypeVar("Line")


class Listed(NamedTuple, Generic[Line]):
    """The first lines of a listing, and whether there are more."""

    lines: list[Line]
    truncated: bool


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
        """The processes behind a lease."""
        processes = self._core.ledger.processes
        return tuple(sorted(processes[token].pid for token in lease.processes if token in processes))

    @property
    def processes(self) -> int:
        """Processes that are connected, of every tenant."""
        return len(self._core.ledger.processes)

    # -- transfers ---------------------------------------------------------------------------------------------

    def running(self) -> list[Ticket]:
        """Transfers that have not ended."""
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
        """True where nothing new is opened."""
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
