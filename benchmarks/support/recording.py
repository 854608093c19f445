"""Writer of results: figures as they were measured, one row of a table on one line, and no raw series."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.support.machine import describe_gpu, describe_machine

WIDTH = 110


def parser_of(doc: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """Parser of a benchmark's command line, with ``--json``. ``doc``: its module's docstring."""
    parser = argparse.ArgumentParser(prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the result here")
    return parser


def save(said: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write a result where ``--json`` asks for it, with the machine, and its GPU where ``--backend cuda`` was meant."""
    if said.json:
        gpu = describe_gpu() if getattr(said, "backend", "") == "cuda" else {}
        write_result(said.json, {"machine": describe_machine() | gpu, **found})


def write_result(path: str | Path, found: dict[str, Any]) -> None:
    """Write a benchmark's result. Of a series keep aggregates (n, min, p50, p99, max) and no rows."""
    Path(path).write_text(render(found) + "\n", encoding="utf-8")


def render(value: Any, depth: int = 0) -> str:
    """JSON in which what fits stands on one line, and so does every row of figures below the first level."""
    flat = json.dumps(value)
    if not isinstance(value, dict | list) or not value:
        return flat
    inner = list(value.values()) if isinstance(value, dict) else value
    is_row = not any(isinstance(each, dict | list) for each in inner)
    if depth + len(flat) <= WIDTH or (is_row and (isinstance(value, list) or depth > 1)):
        return flat
    indent = " " * (depth + 1)
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {render(each, depth + 1)}" for key, each in value.items()]
        start, end = "{", "}"
    else:
        lines = [render(each, depth + 1) for each in value]
        start, end = "[", "]"
    return start + "\n" + ",\n".join(indent + line for line in lines) + "\n" + " " * depth + end
