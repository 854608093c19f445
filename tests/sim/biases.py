"""Biases of seeds: each makes some rare meeting of events common, and each seed has one bias.

Left to chance alone, four engines in roomy pools seldom meet: in 360 seeds a sequence came back from the host a few
dozen times, and never while the pages that it came back to were wanted by others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cachesvc.model.words import WritePolicy

GQA, GQA_BESIDE, WINDOWED, WINDOWED_BESIDE = range(4)
"""Layouts that an engine registers: two replicas of a model with one full group, two of one with a window too."""
ANY_KINDS = ((GQA,), (WINDOWED,), (GQA, GQA_BESIDE, GQA_BESIDE, WINDOWED_BESIDE), (GQA, GQA_BESIDE, WINDOWED, 3, 3))


@dataclass(frozen=True, slots=True)
class Bias:
    """Ranges are of pages, both ends included. ``kinds``: what each engine may register.

    ``families``: of prompts that begin alike; ``same``: how likely a block is that of most of its family. ``engine``
    and ``world``: factor of the likelihood of an engine's action, or of an event around it.
    ``misfortune``: how likely an event is a rare one. ``requests``: open at most, for each engine. ``host_is_there``:
    all of the host's memory has come before the first engine. ``evicted_tiers``: where an operator evicts.
    ``ahead_pages``: that are kept free.
    """

    name: str
    device: tuple[int, int] = (8, 24)
    device_windows: tuple[int, int] = (8, 24)
    host: tuple[int, int] = (0, 24)
    host_windows: tuple[int, int] = (0, 24)
    kinds: tuple[tuple[int, ...], ...] = ANY_KINDS
    policies: tuple[WritePolicy, ...] = tuple(WritePolicy)
    families: int = 1
    same: float = 0.8
    most_blocks: int = 7
    requests: int = 3
    engine: Mapping[str, float] = field(default_factory=dict)
    world: Mapping[str, float] = field(default_factory=dict)
    misfortune: float = 0.025
    host_is_there: bool = True
    evicted_tiers: tuple[str, ...] = ("device", "device", "device", "host")
    ahead_pages: int = 0


THROUGH, BACK = WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK
WINDOWED_ALONE = ((WINDOWED,), (WINDOWED,), (WINDOWED, WINDOWED_BESIDE), (WINDOWED, WINDOWED_BESIDE))

BIASES = (
    Bias("chance", host_is_there=False),
    Bias(
        "swaps",
        device=(8, 12),
        host=(16, 24),
        kinds=((GQA,), (GQA,), (GQA,), (WINDOWED,)),
        policies=(THROUGH, THROUGH, BACK),
        families=2,
        same=0.9,
        most_blocks=4,
        requests=2,
        engine={"swap_out": 3, "swap_in": 1.5, "prefetch": 0.3},
        world={"copy_moves": 2, "operator_evicts": 0.3},
        misfortune=0.01,
    ),
    Bias(
        "windows",
        device=(16, 24),
        device_windows=(8, 8),
        host=(20, 24),
        host_windows=(16, 24),
        kinds=WINDOWED_ALONE,
        policies=(THROUGH,),
        families=2,
        same=0.97,
        most_blocks=5,
        requests=1,
        engine={"recycle": 4, "prefetch": 0.2, "swap_out": 0.3},
        world={"operator_evicts": 0.5, "copy_moves": 2},
        misfortune=0.01,
    ),
    Bias(
        "loads",
        device=(20, 24),
        host=(24, 24),
        host_windows=(14, 24),
        kinds=((GQA,), (GQA,), (GQA,), (GQA, WINDOWED)),
        policies=(THROUGH,),
        families=2,
        same=0.98,
        most_blocks=8,
        requests=1,
        evicted_tiers=("device",),
        ahead_pages=4,
        engine={"allocate": 2, "begin": 2, "swap_out": 0.3, "release": 2, "prefetch": 0.5},
        world={"operator_evicts": 5, "copy_moves": 0.7, "copy_fails": 6},
        misfortune=0.01,
    ),
    Bias(
        "prefetches",
        device=(8, 14),
        host=(20, 24),
        host_windows=(14, 24),
        kinds=((GQA,), (WINDOWED,), (GQA, GQA_BESIDE), (WINDOWED, WINDOWED_BESIDE)),
        policies=(THROUGH, THROUGH, BACK),
        families=2,
        same=0.96,
        most_blocks=5,
        requests=2,
        evicted_tiers=("device",),
        engine={"prefetch": 4, "release": 2},
        world={"operator_evicts": 2, "copy_fails": 2},
    ),
    Bias(
        "drains",
        device=(8, 11),
        device_windows=(8, 12),
        host=(20, 24),
        kinds=((GQA,), (GQA,), (GQA, GQA_BESIDE), (GQA, WINDOWED)),
        policies=(BACK,),
        families=3,
        same=0.9,
        most_blocks=5,
        requests=1,
        world={"copy_moves": 0.5, "operator_evicts": 0.3, "copy_fails": 2},
        misfortune=0.01,
    ),
    Bias(
        "losses",
        device=(8, 14),
        host=(12, 24),
        host_windows=(8, 24),
        kinds=((GQA,), (GQA, GQA_BESIDE), (GQA_BESIDE,), (WINDOWED, WINDOWED_BESIDE)),
        families=2,
        same=0.95,
        most_blocks=6,
        requests=2,
        world={"mover_dies": 8},
        misfortune=0.05,
    ),
    Bias(
        "full host",
        device=(9, 14),
        host=(2, 8),
        host_windows=(1, 6),
        kinds=((GQA,), (GQA,), (GQA, GQA_BESIDE), (WINDOWED,)),
        most_blocks=4,
        requests=2,
        engine={"swap_out": 3, "swap_in": 2},
        world={"copy_moves": 1.5, "operator_evicts": 0.5},
        misfortune=0.01,
    ),
)


def bias_of(seed: int) -> Bias:
    """The bias that a seed has."""
    return BIASES[seed % len(BIASES)]
