"""Tables of docs/vllm.md from docs/data/vllm-support.toml: what runs under vLLM, and its evidence."""

from __future__ import annotations

import tomllib
from typing import Any

from tools.results import ROOT, load, rows

PAGE = ROOT / "docs" / "vllm.md"
SUPPORT = ROOT / "docs" / "data" / "vllm-support.toml"
NOT_TRIED = "not tried"


def support() -> dict[str, list[dict[str, Any]]]:
    """Rows of each table."""
    return tomllib.loads(SUPPORT.read_text(encoding="utf-8"))


def models() -> str:
    """A row for each family of models."""
    return _table("models", support()["models"])


def features() -> str:
    """A row for each feature."""
    return _table("feature", support()["features"])


def ran(run: str) -> tuple[str, str]:
    """GPU and date of a run, which is a file and the keys that lead to what it found. Raises KeyError where that is
    not in the file, or the file is not of a GPU."""
    name, *keys = run.split(" ")
    found: Any = load(name)
    machine = found["machine"]
    for key in keys:
        found = found[key]
    if not found:
        raise KeyError(run)
    return machine["gpu"].split(" ")[1], machine["date"]


def _table(what: str, entries: list[dict[str, Any]]) -> str:
    head = [what, "on a processor", "on a GPU", "remarks"]
    return rows(head, [[row["what"], *_shown(row), _remarks(row)] for row in entries])


def _shown(row: dict[str, Any]) -> list[str]:
    if "refused" in row:
        return ["refused", "refused"]
    gpus = dict(sorted(map(ran, row.get("runs", ()))))  # the last run on each
    return ["tests" if row.get("tests") else NOT_TRIED, ", ".join(map(" ".join, gpus.items())) or NOT_TRIED]


def _remarks(row: dict[str, Any]) -> str:
    return "; ".join(row[name] for name in ("refused", "note") if name in row)
