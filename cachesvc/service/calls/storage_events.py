"""Between the flows and the storage tier: requests one way, news the other, each in the other's words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from cachesvc.flows.context.core import Core, Fetched, FetchedObject, FetchRequest, KeepRequest, StoredUse
from cachesvc.flows.storage.fetch import fetched
from cachesvc.flows.storage.presence import forget, forget_all
from cachesvc.flows.storage.uses import spread_all
from cachesvc.flows.storage.write import begin_soon, kept, pump_all
from cachesvc.ledger.ledger import Model
from cachesvc.storage.seam import Outcome, Use
from cachesvc.storage.tier import News, Tier

Run = Callable[[int, Callable[[], None]], None]
"""``(model, flow)``: runs a flow of a model on the ledger thread, as the root of a callback."""


class StorageFlows:
    """Storage seam of the flows. ``run``: see ``Run``."""

    def __init__(self, tier: Tier, core: Core, run: Run) -> None:
        self.tier = tier
        self._core = core
        self._run = run
        self.wait_seconds = tier.wait_seconds
        self.keeps_all = tier.keeps_all
        self.keeps_used = tier.keeps_used
        self.expects = tier.expects
        self.lagged = tier.lagged
        self.room = tier.room
        self.has = tier.has
        self.forget = tier.forget
        tier.tell = self._told
        tier.tell_gone = self._gone
        tier.tell_lost = self._lost
        core.storage = self
        core.on_wanted = partial(begin_soon, core)

    def fetch(self, request: FetchRequest) -> list[int]:
        """See ``flows.core.Storage``."""
        return self.tier.fetch(request.model, request.ticket, request.keys, request.pages, request.parent)

    def keep(self, request: KeepRequest) -> int:
        """See ``flows.core.Storage``."""
        return self.tier.keep(request.model, request.key, request.pages, request.parent)

    def used(self, model: Model, uses: Sequence[StoredUse]) -> None:
        """See ``flows.core.Storage``."""
        self.tier.used(model, [Use(*each) for each in uses], model.blocks.chooser)

    def tick(self) -> None:
        """Do periodic work, on the ledger thread."""
        self.tier.tick()
        spread_all(self._core)
        pump_all(self._core)

    def _lost(self) -> None:
        for model in self._core.ledger.models.values():
            forget_all(self._core, model)

    def _gone(self, model: int, keys: list[bytes]) -> None:
        self._run(model, partial(forget, self._core, model, keys))

    def _told(self, model: int, ticket: int, key: bytes, news: list[News]) -> None:
        if ticket:
            found = [FetchedObject(each.block, each.groups, _as_fetched(each.outcome)) for each in news]
            self._run(model, lambda: fetched(self._core, model, ticket, found))
        else:
            outcomes = [_as_fetched(each.outcome) for each in news]
            self._run(model, partial(self._kept, model, key, outcomes))

    def _kept(self, model_id: int, key: bytes, outcomes: list[Fetched]) -> None:
        model: Model | None = self._core.ledger.models.get(model_id)
        if model is not None and kept(self._core, model_id, key, outcomes):
            self.tier.kept(model)


def _as_fetched(outcome: Outcome | None) -> Fetched:
    if outcome is None:
        return Fetched.BACK
    if outcome is Outcome.LATE:
        return Fetched.LATE
    if outcome is Outcome.LENT:
        return Fetched.LENT
    if outcome is Outcome.MISPLACED:
        return Fetched.MISPLACED
    return Fetched.WHOLE if outcome is Outcome.OK else Fetched.GONE
