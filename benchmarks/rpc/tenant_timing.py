"""Can a tenant tell by the clock whether another tenant's prompt is cached? Times Match over the socket.

Tenant B asks for prompts that tenant A has cached and for unknown prompts, in random order; a Mann-Whitney test
says whether the two kinds of answers differ in time. B's own hits against its own misses show that the test can see a
difference where there is one.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import numpy.typing as npt
from cachesvc_client import CacheClient, Lease, block_keys, opaque
from cachesvc_ctl.core.daemon_process import DaemonProcess

from benchmarks.support.calls import compute, match_ms
from benchmarks.support.recording import parser_of, save

BLOCK_TOKENS = 16
LAYOUT = opaque(block_bytes=1024, block_tokens=BLOCK_TOKENS, layers=2)
BLOCKS = 64
PROMPTS = 32
PAGES = 3 * BLOCKS * PROMPTS
Times = npt.NDArray[np.float64]


def mann_whitney(left: Times, right: Times) -> tuple[float, float]:
    """Two-sided p, by the normal approximation, and the chance that one of ``left`` takes longer than one of ``right``.

    Times of equal length are counted half; there are too few of them to correct the variance for.
    """
    both = np.concatenate((left, right))
    order = both.argsort(kind="stable")
    ranks = np.empty(len(both))
    ranks[order] = np.arange(1, len(both) + 1)
    u = float(ranks[: len(left)].sum()) - len(left) * (len(left) + 1) / 2
    pairs = len(left) * len(right)
    z = (u - pairs / 2) / math.sqrt(pairs * (len(both) + 1) / 12)
    return math.erfc(abs(z) / math.sqrt(2)), u / pairs


def prompt(seed: int) -> list[int]:
    """Tokens of one prompt."""
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(BLOCKS * BLOCK_TOKENS)]


def time_matches(lease: Lease, kinds: dict[str, list[bytes]], samples: int, seed: int) -> dict[str, Times]:
    """Microseconds of ``samples`` Match calls of each kind, in random order."""
    rng = random.Random(seed)
    order = [kind for kind in kinds for _ in range(samples)]
    rng.shuffle(order)
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind in order:
        keys = rng.choice(kinds[kind])
        taken[kind].append(match_ms(lease, keys) * 1e3)
    return {kind: np.array(values) for kind, values in taken.items()}


def measure(samples: int, seed: int) -> dict[str, Any]:
    """Run it on a daemon of its own."""
    flags = ["--backend", "shm", "--device-pool", "64MiB", "--host-pool", "0", "--drain-seconds", "0"]
    with DaemonProcess(flags) as daemon, CacheClient(daemon.socket) as a, CacheClient(daemon.socket) as b:
        mine, other = (
            client.register("m@1", LAYOUT, tenant_salt=salt, device_pages=[PAGES], host_pages=[0])
            for client, salt in ((b, b"secret of b"), (a, b"secret of a"))
        )
        lease, others = b.open_lease(mine), a.open_lease(other)
        kinds: dict[str, list[bytes]] = {"others_hit": [], "nobodys": [], "own_hit": []}
        for number in range(PROMPTS):
            for index, kind in enumerate(kinds):
                kinds[kind].append(block_keys(mine.namespace, prompt(number * 3 + index), BLOCK_TOKENS))
            compute(others, block_keys(other.namespace, prompt(number * 3), BLOCK_TOKENS))
            compute(lease, kinds["own_hit"][-1])
        time_matches(lease, kinds, samples // 10, seed)
        times = time_matches(lease, kinds, samples, seed + 1)
    crossing, own = (mann_whitney(times[kind], times["nobodys"]) for kind in ("others_hit", "own_hit"))
    return {
        "samples_of_each": samples,
        "median_us": {kind: float(np.median(values)) for kind, values in times.items()},
        "another_tenants_hit_against_a_miss": {"p": crossing[0], "chance_slower": crossing[1]},
        "own_hit_against_a_miss": {"p": own[0], "chance_slower": own[1]},
    }


def main() -> None:
    """Print the result, and write it where asked."""
    parser = parser_of(__doc__, "python -m benchmarks.rpc.tenant_timing")
    parser.add_argument("--samples", type=int, default=10_000, metavar="N", help="of each kind (default 10000)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    found = measure(arguments.samples, arguments.seed)
    for kind, median_us in found["median_us"].items():
        print(f"{kind:40} median {median_us:8.1f} us of {arguments.samples:,}")
    for name in ("another_tenants_hit_against_a_miss", "own_hit_against_a_miss"):
        print(f"{name:40} p {found[name]['p']:.4f}, chance slower {found[name]['chance_slower']:.4f}")
    save(arguments, found)


if __name__ == "__main__":
    main()
