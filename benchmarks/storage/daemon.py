"""``python -m benchmarks.storage.daemon PYTHON -m cachesvc FLAGS``: a daemon whose storage claims to hold every object
and never answers: a frozen disk."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import cachesvc.storages
from cachesvc.__main__ import main
from cachesvc.model.words import KEY_BYTES
from cachesvc.storage.seam import (
    Caps,
    Check,
    Checked,
    Chooser,
    Each,
    Found,
    Gone,
    Item,
    ObjectName,
    Part,
    Rank,
    Scope,
    Step,
    StorageBackend,
    StoreStatus,
    Totals,
    Use,
    no_step,
    oldest_first,
)
from cachesvc.storage.spec import StorageSpec


class FrozenStorage:
    """Keeps what it is asked, and never comes back to it."""

    kind = "frozen"
    caps = Caps(is_shared=False, survives="daemon")

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def start(self) -> None:
        """Nothing begins."""

    def register(self, chunk: memoryview) -> None:
        """Any memory will do."""

    def describe(self, scope: Scope, label: str) -> None:
        """Do nothing."""

    def watch(self, gone: Gone) -> None:
        """Nothing goes."""

    def used(self, scope: Scope, uses: Sequence[Use], chooser: Chooser | None) -> None:
        """It evicts nothing."""

    def expects(self, scope: Scope, keys: bytes, parts: Sequence[Part]) -> int | None:
        return len(keys) // KEY_BYTES

    def exists(self, names: Sequence[ObjectName], deadline: float, found: Found) -> None:
        self.asked.append(names)

    def get(self, items: Sequence[Item], deadline: float, each: Each) -> None:
        self.asked.append(items)

    def put(self, items: Sequence[Item], deadline: float, each: Each) -> None:
        self.asked.append(items)

    def remove(self, names: Sequence[ObjectName]) -> None:
        """Not now."""

    def doubt(self, names: Sequence[ObjectName], check: Check) -> None:
        """Not now."""

    def purge(self, scope: Scope | None, step: Step = no_step) -> int:
        return 0

    def status(self) -> StoreStatus:
        return StoreStatus()

    def totals(self) -> Totals:
        return Totals(0, 0, 0, 0)

    def check_all(self, check: Check, step: Step = no_step) -> Checked:
        return Checked()

    def close(self) -> None:
        """Leave the hung thread behind."""


def frozen_backend(spec: StorageSpec, rank: Rank = oldest_first) -> StorageBackend:
    """Whatever engine was named."""
    return FrozenStorage()


if __name__ == "__main__":
    cachesvc.storages.make_backend = frozen_backend
    sys.argv = sys.argv[sys.argv.index("cachesvc") :]
    main()
