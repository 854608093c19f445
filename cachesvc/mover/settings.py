"""Settings of a mover at its start: its device, and the rules by which copies share the link."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cachesvc.memory.copy.arbiter import SLICE_BYTES, CopyRules
from cachesvc.memory.timeline import TIMELINE_WORDS

JOBS_BYTES = 4 << 20
"""Size of the ring of jobs: a quarter of a million pages of either side that are not read yet; more wait in the
daemon."""
ENDS_BYTES = 1 << 20
"""Size of the ring of ends: of every job of a model that can be in flight, were each to fail with a reason of 200
bytes."""


@dataclass(frozen=True, slots=True)
class Settings:
    """``kind``: ``shm`` or ``cuda``. ``device``: the name of a pretended device, or a GPU's UUID. ``place``: of
    the device among the node's. The rest is as in the configuration of the same name."""

    kind: str
    device: str
    device_bytes: int
    vmm: bool = False
    timeline_words: int = TIMELINE_WORDS
    slice_bytes: int = SLICE_BYTES
    load_limit: int = 0
    store_limit: int = 0
    fault_copies: float = 0.0
    log_level: str = "info"
    place: int = 0

    def told(self) -> dict[str, Any]:
        """The settings as numbers and words, for ``Settings(**told)``."""
        return asdict(self)

    @property
    def rules(self) -> CopyRules:
        """Rules by which copies share the link."""
        return CopyRules(self.slice_bytes, self.load_limit, self.store_limit)
