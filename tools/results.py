"""Recorded results, and how a table of them looks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict[str, Any]:
    """One file of benchmarks/results."""
    loaded = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def rows(head: list[str], body: list[list[str]], *machines: dict[str, Any]) -> str:
    """A table, and under it the machines that it was measured on, each with its date."""
    lines = [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body]]
    if machines:
        lines += ["", f"<sub>{'; '.join(dict.fromkeys(map(_said, machines)))}</sub>"]
    return "\n".join(lines)


def _said(machine: dict[str, Any]) -> str:
    if "gpu" in machine:
        return f"{machine['gpu']}, driver {machine['driver']}, {machine['cores']} cores, {machine['date']}"
    return f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, {machine['date']}"
