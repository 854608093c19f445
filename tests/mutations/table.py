"""The table of defects, from the ``.toml`` files beside this one.

A defect is a file of the code, a text that stands there exactly once, and what stands there instead. ``tests``: what is
run against it, from the file's head unless it has its own. ``simulated``: the simulation drives that code.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Stale(ValueError):
    """A defect cannot be put in: the code has moved on, and the table must follow."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One defect."""

    name: str
    part: str
    file: str
    breaks: str
    text: str
    replacement: str
    tests: tuple[str, ...]
    simulated: bool

    def applied_to(self, source: str) -> str:
        """The file's text with the defect in it. Raises Stale where it does not stand there exactly once."""
        found = source.count(self.text)
        if found != 1:
            raise Stale(f"{self.name}: the text stands {found} times in {self.file}, not once")
        return source.replace(self.text, self.replacement)


def load_mutations() -> list[Mutation]:
    """All of them, by part."""
    found = []
    for path in sorted(Path(__file__).parent.glob("*.toml")):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        for row in table["mutation"]:
            tests, simulated = row.pop("tests", table["tests"]), row.pop("simulated", table["simulated"])
            found.append(Mutation(part=path.stem, tests=tuple(tests), simulated=simulated, **row))
    return found
