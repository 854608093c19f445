"""Writer of results: figures as they were measured, one row of a table on one line, and no raw series."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WIDTH = 110


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
