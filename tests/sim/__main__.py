"""Replay one seed or search many: ``python -m tests.sim SEED [STEPS]``, ``python -m tests.sim FIRST..LAST [STEPS]``."""

from __future__ import annotations

import sys
import traceback
from collections import Counter

from tests.sim.world import run


def main() -> int:
    seeds, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 200
    first, _, last = seeds.partition("..")
    total: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for seed in range(int(first), int(last or first) + 1):
        try:
            world = run(seed, steps)
        except Exception as error:  # noqa: BLE001 - the search goes on
            failures[f"{type(error).__name__}: {str(error)[:100]}"] += 1
            if sum(failures.values()) <= 3:
                traceback.print_exc()
            continue
        total += world.faults
        total += world.node.events
        total["verified_pages"] += sum(engine.verified for engine in world.engines)
        total["steps"] += world.steps
    print(dict(sorted(total.items())))
    for what, count in failures.most_common(12):
        print(f"FAILED {count}: {what}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
