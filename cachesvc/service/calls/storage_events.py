"""Between the flows and the storage tier: requests one way, news the other, each in the other's words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from cachesvc.flows.context.core import Core, Fetched, FetchedObject, FetchRequest, KeepRequest, StoredUse
from cachesvc.flows.storage.expected import tick_expected
from cachesvc.flows.storage.fetch import fetched
from cachesvc.flows.storage.presence import forget, forget_all
from cachesvc.flows.storage.uses import spread_all
from cachesvc.flows.storage.write import begin_soon, kept, pump_all
from cachesvc.ledger.index.tier_copies import NO_ROW
from cachesvc.ledger.ledger import Model
from cachesvc.model.words import READY
from cachesvc.storage.seam import Outcome, Use
from cachesvc.storage.tier.coming import News
from cachesvc.storage.tier.tiers import Tiers

OWED_PATHS = 64
"""Used paths of one batch that are looked at for what a tier lacks, some 50 us each."""
Run = Callable[[int, Callable[[], None]], None]
"""``(model, flow)``: runs a flow of a model on the ledger thread, as the root of a callback."""


class StorageFlows:
    """Storage seam of the flows. ``run``: see ``Run``."""

    def __init__(self, tiers: Tiers, core: Core, run: Run) -> None:
        self.tiers = tiers
        self.promoted_blocks = 0
        self._core = core
        self._run = run
        self.wait_seconds = tiers.wait_seconds
        self.keeps_all = tiers.keeps_all
        self.keeps_used = tiers.keeps_used
        self.expects = tiers.expects
        self.lagged = tiers.lagged
        self.room = tiers.room
        self.has = tiers.has
        self.forget = tiers.forget
        tiers.tell = self._told
        tiers.tell_gone = self._gone
        tiers.tell_lost = self._lost
        tiers.owed = self._owed
        core.storage = self
        core.on_wanted = partial(begin_soon, core)

    def fetch(self, request: FetchRequest) -> list[int]:
        """See ``flows.core.Storage``."""
        return self.tiers.fetch(request.model, request.ticket, request.keys, request.pages, request.parent)

    def keep(self, request: KeepRequest) -> int:
        """See ``flows.core.Storage``."""
        return self.tiers.keep(request.model, request.key, request.pages, request.parent)

    def used(self, model: Model, uses: Sequence[StoredUse]) -> None:
        """See ``flows.core.Storage``."""
        self.tiers.used(model, [Use(each.key, each.queue) for each in uses], model.blocks.chooser)
        if not self.tiers.are_several:
            return
        index = model.blocks.index
        hit = [each.key for each in uses if each.hits]
        for key in hit[:OWED_PATHS]:
            row = index.rows.get(key, NO_ROW)
            if row != NO_ROW:
                path = index.path(row)
                self.tiers.owe(model, len(path), lambda depth, path=path: index.key_of(path[depth]))  # type: ignore[misc]

    def _owed(self, model_id: int, keys: list[bytes]) -> None:
        """Write blocks to tiers that lack them, where they are on the host, root first."""
        model: Model | None = self._core.ledger.models.get(model_id)
        if model is None:
            return
        stored, index, host = model.stored, model.blocks.index, model.blocks.host
        idle = [key for key in keys if key not in stored.keeping and key not in stored.wanted]
        rows = [index.rows.get(key, NO_ROW) for key in idle]
        here = [row for row in rows if row != NO_ROW and host.states[host.lead][row] == READY]
        self.promoted_blocks += len(here)
        stored.ready.extend(index.key_of(row) for row in sorted(here, key=index.depth.__getitem__))
        if here:
            begin_soon(self._core, model)

    def tick(self) -> None:
        """Do periodic work, on the ledger thread."""
        self.tiers.tick()
        tick_expected(self._core)
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
        if model is not None:
            kept(self._core, model_id, key, outcomes)


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
