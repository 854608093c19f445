"""The disk of a simulation: the flows of storage and the catalogue of ``file``, without files, bytes or waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from cachesvc.flows.context.core import Core, Fetched, FetchedObject, FetchRequest, KeepRequest, StoredUse
from cachesvc.flows.storage.fetch import fetched
from cachesvc.flows.storage.flush import begin_flush, go_on
from cachesvc.flows.storage.presence import forget
from cachesvc.flows.storage.uses import spread_all
from cachesvc.flows.storage.write import begin_soon, kept, pump_all
from cachesvc.ledger.ledger import Model
from cachesvc.storage.file.blocks.catalogue import Catalogue
from cachesvc.storage.seam import LAYOUT_ID_BYTES, ObjectName, Part, Rank, Scope, Use

SCOPE = Scope(bytes(32), bytes(LAYOUT_ID_BYTES))
PART = Part(0, 0, 1)
ANY_BYTES = 1 << 60
BLOCK_BYTES = 1
"""Bytes of a block in the layout of simulations."""


class SimulatedDisk:
    """Storage of the flows, for ``blocks`` blocks of one model. What is asked of it is done by ``run``. ``before``: the
    disk of a daemon that has ended: what lies there was used as long ago as then, and no more is known of it."""

    wait_seconds = float("inf")
    keeps_all = False
    keeps_used = True

    def __init__(self, blocks: int, rank: Rank, before: SimulatedDisk | None = None) -> None:
        self.seconds: float = 0.0 if before is None else before.seconds
        self._blocks = blocks
        self._catalogue = Catalogue(rank, self._now_ms)
        self._core: Core | None = None
        self._due: deque[Callable[[], object]] = deque()
        if before is not None:
            self._catalogue.add_all(before._catalogue.entries())  # noqa: SLF001 - of the same class

    def connect(self, core: Core) -> None:
        """Serve this ledger's flows."""
        self._core = core
        core.storage = self
        core.on_wanted = partial(begin_soon, core)

    def run(self) -> bool:
        """Do what was asked; False where there was nothing."""
        had = bool(self._due)
        while self._due:
            self._due.popleft()()
        return had

    def tick(self) -> None:
        """Do the periodic work of a daemon's tier."""
        spread_all(self._of_daemon())
        pump_all(self._of_daemon())

    def flush(self, settle: Callable[[], None]) -> None:
        """Flush, as at an orderly stop that has enough time. ``settle``: ends what is under way."""
        self.tick()
        settle()
        left = begin_flush(self._of_daemon(), self._blocks * BLOCK_BYTES)
        while left:
            settle()
            before, left = left, go_on(self._of_daemon())
            if left == before:
                return

    # -- the seam of the flows ---------------------------------------------------------------------------------------

    def expects(self, model: Model, keys: bytes) -> int:  # noqa: ARG002 - there is one model
        """See ``flows.context.core.Storage``."""
        return self._catalogue.expects(SCOPE, keys, (PART,))

    def has(self, model: Model, key: bytes) -> bool:  # noqa: ARG002 - as above
        """See ``flows.context.core.Storage``."""
        return bool(self._catalogue.expects(SCOPE, key, (PART,)))

    def used(self, model: Model, uses: Sequence[StoredUse]) -> None:
        """See ``flows.context.core.Storage``."""
        self._catalogue.use_blocks(
            SCOPE, [Use(each.key, each.queue) for each in uses], model.blocks.chooser, self._now_ms()
        )

    def lagged(self) -> None:
        """It never lags."""

    def room(self) -> int:
        """Any number of bytes."""
        return ANY_BYTES

    def fetch(self, request: FetchRequest) -> list[int]:
        """All of it comes: it was expected."""
        blocks = len(request.pages[0])
        found = [FetchedObject(block, (0,), Fetched.WHOLE) for block in range(blocks)]
        last = ObjectName(SCOPE, request.keys[-32:], PART)
        self._due.append(lambda: self._catalogue.use(last, self._now_ms()))
        self._due.append(partial(fetched, self._of_daemon(), request.model.id, request.ticket, found))
        return [1] * blocks

    def keep(self, request: KeepRequest) -> int:
        """Make room by the policy, and keep the block."""
        name = ObjectName(SCOPE, request.key, PART)
        if self._catalogue.use(name, self._now_ms()) is None:
            gone = self._catalogue.take_oldest(1, self._blocks - 1)
            if gone:
                forget(self._of_daemon(), request.model.id, [entry.name.key for entry in gone])
            self._catalogue.add(name, 1, self._now_ms(), request.parent)
        self._due.append(partial(kept, self._of_daemon(), request.model.id, request.key, [Fetched.WHOLE]))
        return 1

    def forget(self, model_id: int) -> None:
        """No model leaves a simulation."""

    def _of_daemon(self) -> Core:
        assert self._core is not None, "it was connected"
        return self._core

    def _now_ms(self) -> int:
        return int(self.seconds * 1000)
