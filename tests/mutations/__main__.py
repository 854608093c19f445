"""Put in one defect after another and see what notices it.

python -m tests.mutations [--only NAME ...] [--json OUT]

Each defect is put into a copy of the working tree. Its quick tests run there until one fails; apart from them, where
the simulation drives the code, seeds are simulated until one fails or ``--seconds`` of processor time are spent. With
``--json`` the results are written after each defect, and those that stand there already are not run again. Exit code 1
where a defect got through all quick tests. A test that fails without any defect, or not again by itself, counts for
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.support.recording import write_result
from tests.mutations.table import ROOT, Mutation, load_mutations

LIMIT_SECONDS = 1800.0
"""A defect that lets a test hang is noticed, in the end."""
MISSED = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Test or failing seed that noticed a defect; empty: nothing did, None: not tried."""

    name: str
    part: str
    file: str
    breaks: str
    tests: str | None
    simulation: str | None


class Copy:
    """Copy of the working tree, in a folder of its own."""

    def __init__(self, folder: Path, processes: int) -> None:
        self._folder = folder
        self._sound = ""
        self._spread = ["-n", str(processes)] if processes > 1 else []
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, stdout=-1
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def failing(self, tests: tuple[str, ...]) -> list[str]:
        """All tests that fail, and files that cannot be read."""
        said = self._run("pytest", "-q", "-p", "no:cacheprovider", *self._spread, *tests)
        if said is None:
            return [f"no end after {LIMIT_SECONDS:g} s"]
        code, text = said
        found = _failures(text)
        if code and not found:
            sys.exit(f"the tests cannot be run here, exit code {code}: {text.strip()[-400:]}")
        return found

    def test(self, tests: tuple[str, ...], without: list[str]) -> str:
        """The first test that fails, and does so again by itself; or empty. Those in ``without`` are left out."""
        passed_over = list(without)
        while True:
            left_out = [f"--{'deselect' if '::' in each else 'ignore'}={each}" for each in passed_over]
            said = self._run("pytest", "-q", "-x", "-p", "no:cacheprovider", *self._spread, *left_out, *tests)
            if said is None:
                return f"no end after {LIMIT_SECONDS:g} s"
            code, text = said
            if code == 0:
                return MISSED
            found = _failures(text)
            if not found:
                return f"exit code {code}: {text.strip()[-200:]}"
            first = found[0].partition("[")[0]
            if self.failing((first,)):
                return first
            passed_over.append(first)  # by chance, or because of what else runs on this machine

    def simulate(self, seconds: float) -> str:
        """The first seed that fails, or empty."""
        said = self._run("tests.sim", "0..", "--seconds", f"{seconds:g}")
        if said is None:
            return f"no end after {LIMIT_SECONDS:g} s"
        code, text = said
        found = re.search(r"^FAILED (.*)$", text, re.MULTILINE)
        return MISSED if code == 0 else found[1] if found else f"exit code {code}: {text.strip()[-200:]}"

    def put_in(self, mutation: Mutation) -> None:
        """Break one file. Raises Stale."""
        path = self._folder / mutation.file
        self._sound = path.read_text(encoding="utf-8")
        path.write_text(mutation.applied_to(self._sound), encoding="utf-8")

    def take_out(self, mutation: Mutation) -> None:
        """Mend it."""
        (self._folder / mutation.file).write_text(self._sound, encoding="utf-8")

    def _run(self, *module: str) -> tuple[int, str] | None:
        parts = [str(self._folder / part) for part in ("", "client", "proto/gen")]
        path = os.pathsep.join([*parts, *filter(None, (os.environ.get("PYTHONPATH"),))])
        try:
            ended = subprocess.run(
                [sys.executable, "-m", *module],
                cwd=self._folder,
                env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
                check=False,
                timeout=LIMIT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return None
        return ended.returncode, ended.stdout + ended.stderr


class Harness:
    """Runs defects; remembers which tests fail without any."""

    def __init__(self, copy: Copy, seconds: float, *, tests: bool, simulation: bool) -> None:
        self._copy = copy
        self._seconds = seconds
        self._tests = tests
        self._simulation = simulation
        self._failing: dict[tuple[str, ...], list[str]] = {}

    def run(self, mutation: Mutation) -> Outcome:
        """One defect."""
        if self._tests and mutation.tests not in self._failing:
            self._failing[mutation.tests] = self._copy.failing(mutation.tests)
            for each in self._failing[mutation.tests]:
                print(f"fails without any defect, and is left out: {each}", file=sys.stderr, flush=True)
        self._copy.put_in(mutation)
        try:
            tests = self._copy.test(mutation.tests, self._failing[mutation.tests]) if self._tests else None
            simulated = self._simulation and mutation.simulated
            seed = self._copy.simulate(self._seconds) if simulated else None
        finally:
            self._copy.take_out(mutation)
        return Outcome(mutation.name, mutation.part, mutation.file, mutation.breaks, tests, seed)


def _failures(text: str) -> list[str]:
    """Tests that pytest names as failed."""
    return re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)


def shown(outcome: Outcome) -> str:
    """One line."""
    tests, seed = (
        "-" if found is None else found.removeprefix("tests/") or "NOT NOTICED"
        for found in (outcome.tests, outcome.simulation)
    )
    return f"{outcome.part:8} {outcome.name:42} {tests[:88]:90} {seed[:60]}"


def summary(outcomes: list[Outcome]) -> str:
    """Number of noticed defects, in words."""
    tried = [each.tests for each in outcomes if each.tests is not None]
    driven = [each.simulation for each in outcomes if each.simulation is not None]
    return (
        f"quick tests noticed {sum(map(bool, tried))} of {len(tried)}; "
        f"the simulation by itself {sum(map(bool, driven))} of {len(driven)}"
    )


def main() -> None:
    """Exit codes: 0 all were noticed, 1 some were not."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="defects by name, or by part")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--no-simulation", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0, help="processor time of a simulation (default 60)")
    parser.add_argument("--processes", type=int, default=1, help="for the tests of one defect")
    parser.add_argument("--json", type=Path, metavar="OUT")
    given = parser.parse_args()
    known = load_mutations()
    chosen = [each for each in known if not given.only or {each.name, each.part} & set(given.only)]
    outcomes: list[Outcome] = []
    if given.json is not None and given.json.exists():
        outcomes = [Outcome(**row) for row in json.loads(given.json.read_text(encoding="utf-8"))["mutations"]]
    done = {each.name for each in outcomes}
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Copy(Path(folder), given.processes)
        harness = Harness(copy, given.seconds, tests=not given.no_tests, simulation=not given.no_simulation)
        for mutation in chosen:
            if mutation.name not in done:
                outcomes.append(harness.run(mutation))
                if given.json is not None:
                    rows = {"seconds": given.seconds, "mutations": [asdict(each) for each in outcomes]}
                    write_result(given.json, rows)
                print(shown(outcomes[-1]), flush=True)
    print(summary(outcomes))
    sys.exit(any(each.tests == MISSED for each in outcomes))


if __name__ == "__main__":
    main()
