"""Tables of docs/vllm.md from docs/data/vllm-support.toml: what runs under vLLM, and its evidence."""

from __future__ import annotations

import tomllib
from typing import Any

from tools.results import ROOT, load, rows

PAGE = ROOT / "docs" / "vllm.md"
SUPPORT = ROOT / "docs" / "data" / "vllm-support.toml"
RANKS = ("vllm-tp4.json", "vllm-tp8.json", "vllm-mla-tp4.json")
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


def ranks() -> str:
    """First tokens under tensor parallelism: computed, found by the same engine and by another one, and alone."""
    body, machines = list[list[str]](), list[dict[str, Any]]()
    for name in RANKS:
        found = load(name)
        shape, machine = found["shape"], found["machine"]
        machines += [machine] if machine not in machines else []
        for ours, plain in zip(found["a"]["ours"], found["a"]["plain"], strict=True):
            times = [ours["computed_ms"], ours["again_ms"], ours["other_ms"], plain["again_ms"]]
            label = f"{shape['model']}, {shape['ranks']} GPUs, {ours['tokens']:,} tokens"
            same = max(ours["other_apart"], ours["again_apart"])
            body.append([label, *(f"{each:.0f}" for each in times), f"{same:g}"])
    head = [
        "ms to the first token",
        "computed",
        "its own hit",
        "another engine's hit",
        "vLLM alone, its own hit",
        "apart",
    ]
    return rows(head, body, *machines)


def families() -> str:
    """Families of hybrids: hits of an engine that computed none of them, held against vLLM alone."""
    found = load("vllm-families.json")
    body = []
    for name, family in found["families"].items():
        if "failed" in family:
            continue
        asked = family["rows"]
        again = next(row for row in asked if row["what"] == "long")
        made, taken = (sum(row["second"][each] for row in asked) for each in ("drafted", "accepted"))
        drafts = f"{family['drafts']['method']}, {taken} of {made}" if family["drafts"] else ""
        same = [sum(row[who]["same"] for row in asked) for who in ("second", "control")]
        apart = [max(row[who]["apart"] for row in asked) for who in ("second", "control")]
        body.append(
            [
                name,
                f"{family['block_tokens']}",
                drafts,
                f"{again['second']['cached']:,}",
                *(f"{count:,}, {most:g}" for count, most in zip(same, apart, strict=True)),
            ]
        )
    head = [
        "family",
        "tokens of a block",
        "drafts accepted",
        "hit of the long prompt",
        "as vLLM alone: tokens, apart",
        "vLLM alone once more",
    ]
    return rows(head, body, found["machine"])


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


TABLES = {
    "vllm-ranks": ranks,
    "vllm-families": families,
    "vllm-models": models,
    "vllm-features": features,
}
