"""Writes the tables of metrics.md, logs.md and settings.md from the code: ``python -m tools.telemetry_docs [--check]``.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; what lies around it is written by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from cachesvc.config import GROUPS, SETTINGS, explain
from cachesvc.telemetry.catalogue import SECTIONS
from cachesvc.telemetry.vocabulary import VOCABULARY

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = (DOCS / "metrics.md", DOCS / "logs.md", DOCS / "settings.md")
TABLE = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def main() -> None:
    """Rewrite the pages, or with ``--check`` fail when they are not what the code says."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fresh = render(text)
        if "--check" in sys.argv[1:]:
            if fresh != text:
                sys.exit(f"{page.name} is stale: run python -m tools.telemetry_docs")
        else:
            page.write_text(fresh, encoding="utf-8")


def render(text: str) -> str:
    """A page with its tables made anew."""
    return TABLE.sub(lambda match: f"<!-- table: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->", text)


def metrics() -> str:
    """Every metric, by the question that it answers."""
    out: list[str] = []
    for question, section in SECTIONS.items():
        out += [f"### {question}", "", "| metric | kind | labels | meaning |", "| --- | --- | --- | --- |"]
        for metric in section:
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            out.append(f"| `{metric.exported}` | {metric.kind.value} | {labels} | {metric.meaning} |")
        out.append("")
    return "\n".join(out).strip()


def events() -> str:
    """Every event."""
    out = ["| event | level | fields | meaning |", "| --- | --- | --- | --- |"]
    for name, event in VOCABULARY.items():
        fields = ", ".join(f"`{field}`" for field in event.fields)
        out.append(f"| `{name}` | {event.level} | {fields} | {event.meaning} |")
    return "\n".join(out)


def settings() -> str:
    """Every setting of the daemon, under the headings of ``cachesvcd --help``."""
    out: list[str] = []
    for name, row in SETTINGS.items():
        if name in GROUPS:
            out += [
                "",
                f"## {GROUPS[name][0].upper()}{GROUPS[name][1:]}",
                "",
                "| setting | value | meaning |",
                "| --- | --- | --- |",
            ]
        value = ", ".join(f"`{choice}`" for choice in row.choices) or f"`{row.unit}`"
        out.append(f"| `{name}` | {value} | {explain(name)}{', live' * row.live} |")
    return "\n".join(out).strip()


TABLES: dict[str, Callable[[], str]] = {"metrics": metrics, "events": events, "settings": settings}

if __name__ == "__main__":
    main()
