"""Replay one seed or search many.

python -m tests.sim SEED [STEPS]
python -m tests.sim FIRST..LAST [STEPS]
python -m tests.sim FIRST.. [STEPS] --seconds N    until one fails, or N seconds of processor time are spent
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import traceback
from collections import Counter

from tests.sim.meetings import MEETINGS
from tests.sim.world import LOOKS, run

TOLD = 3
STEPS = 400


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seeds", metavar="SEED | FIRST..LAST | FIRST..")
    parser.add_argument("steps", type=int, nargs="?", default=STEPS)
    parser.add_argument("--seconds", type=float, help="stop at the first failure, or after this much processor time")
    parser.add_argument("--every-step", action="store_true", help="look at everything after each step: where it broke")
    given = parser.parse_args()
    first, dots, last = given.seeds.partition("..")
    if dots and not last and given.seconds is None:
        parser.error(f"{given.seeds}: without a last seed it takes --seconds")
    seeds = itertools.count(int(first)) if dots and not last else range(int(first), int(last or first) + 1)
    total: Counter[str] = Counter()
    meetings: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for seed in seeds:
        if given.seconds is not None and (failures or time.process_time() > given.seconds):
            break
        try:
            world = run(seed, given.steps, 1.0 if given.every_step else LOOKS)
        except Exception as error:  # noqa: BLE001 - the search goes on
            failures[f"seed {seed}: {type(error).__name__}: {str(error)[:100]}"] += 1
            if len(failures) <= TOLD:
                traceback.print_exc()
            continue
        total += world.faults
        total += world.node.events
        meetings += world.node.meetings.seen
        total["verified_pages"] += sum(engine.verified for engine in world.engines)
        total["steps"] += world.steps
    print(dict(sorted(total.items())))
    print({name: meetings[name] for name in MEETINGS})
    for what in failures:
        print(f"FAILED {what}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
