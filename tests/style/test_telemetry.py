"""One vocabulary: what is logged, exported, drawn and alerted on has the names that the code and the pages say."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from cachesvc.telemetry.catalogue import CATALOGUE, MetricKind
from cachesvc.telemetry.vocabulary import VOCABULARY
from tests.style.tree import ROOT, read_texts
from tools.telemetry_docs import PAGES, TABLE, TABLES, render

GRAFANA = ROOT / "deploy" / "grafana"
METRICS_PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
LOGGING = {"debug", "info", "warning", "error", "exception", "critical"}
SAYING = {"event", "warning", "failure", "limited"}
FROM_ELSEWHERE = {"up", "process_cpu_seconds_total"}
UNDRAWN = {
    "calls_in_flight_limit",
    "compared_hit_tokens",
    "compared_tokens",
    "event_subscribers",
    "draining",
    "dropped_blocks",
    "dropped_unused_blocks",
    "dropped_windows",
    "events",
    "loop_long_rounds",
    "remembered_keys",
    "resident_blocks",
    "storage_evicted_objects",
    "storage_objects",
    "storage_tiers",
    "waiting_calls_limit",
}
"""For a question of the moment, not for a panel."""


def test_the_pages_say_what_the_code_does() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert render(text) == text, "run python -m tools.telemetry_docs"
    named = [name for page in PAGES for name in TABLE.findall(page.read_text(encoding="utf-8"))]
    assert sorted(named) == sorted(TABLES)


def test_every_event_is_in_the_vocabulary_with_its_fields() -> None:
    found = {(name, where): fields for where, name, fields in said()}
    assert len(found) > 20
    unknown = [f"{where}: {name}" for name, where in found if name not in VOCABULARY]
    assert not unknown, "not in cachesvc/telemetry/vocabulary.py:\n" + "\n".join(unknown)
    for (name, where), fields in found.items():
        known = set(VOCABULARY[name].fields)
        assert fields <= known or "..." in known, f"{where}: {name} carries {fields - known}"
    silent = VOCABULARY.keys() - {name for name, _ in found} - {"process_ended", "connection_ended", "library_log"}
    assert silent == {"log_lines_lost"}, "no code logs these"


def said() -> Iterator[tuple[str, str, set[str]]]:
    """``(where, name, fields)`` of every call in the daemon that logs."""
    for file, text in read_texts(".py"):
        if not file.startswith("cachesvc/") or file == "cachesvc/telemetry/events.py":
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                continue
            owner, first = node.func.value, node.args[0]
            if not isinstance(owner, ast.Name) or not isinstance(first, ast.Constant):
                continue
            where = f"{file}:{node.lineno}"
            if owner.id == "events" and node.func.attr in SAYING:
                yield where, str(first.value), {key.arg for key in node.keywords if key.arg}
            elif owner.id == "log" and node.func.attr in LOGGING:
                name, *fields = str(first.value).split(" ")
                assert all(re.fullmatch(r"[a-z_]+=%[-.\d]*[a-z]", field) for field in fields), (
                    f"{where}: {first.value!r}"
                )
                yield where, name, {field.partition("=")[0] for field in fields}


def test_metrics_are_named_by_the_rules() -> None:
    for name, metric in CATALOGUE.items():
        assert re.fullmatch(r"[a-z][a-z_]*[a-z]", name)
        assert metric.name == name
        assert not name.endswith("_total")
        assert name.endswith("_seconds") or metric.kind is not MetricKind.HISTOGRAM
        assert metric.meaning.endswith(".")
        assert not {"key", "salt", "namespace", "lease", "sequence", "engine", "tenant"} & set(metric.labels)


def panels() -> list[dict[str, Any]]:
    """Panels of the dashboard that draw something."""
    dashboard = json.loads((GRAFANA / "dashboard.json").read_text(encoding="utf-8"))
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    """Alert rules."""
    groups = yaml.safe_load((GRAFANA / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def exported_names() -> set[str]:
    """Series that a daemon's page has, by the catalogue."""
    names = set(FROM_ELSEWHERE)
    for metric in CATALOGUE.values():
        names.add(metric.exported)
        if metric.kind is MetricKind.HISTOGRAM:
            names |= {f"{metric.exported}_{part}" for part in ("bucket", "sum", "count")}
    return names


def test_what_is_drawn_and_alerted_on_is_exported() -> None:
    expressions = [target["expr"] for panel in panels() for target in panel["targets"]]
    expressions += [rule["expr"] for rule in rules()]
    assert len(expressions) > 40
    named = {name for expression in expressions for name in re.findall(r"\b(?:cachesvc_|process_cpu)\w+", expression)}
    assert named - exported_names() == set()
    families = {name for name in CATALOGUE if any(CATALOGUE[name].exported in each for each in expressions)}
    assert CATALOGUE.keys() - families == UNDRAWN


def test_panels_do_not_overlap_and_ids_are_unique() -> None:
    dashboard = json.loads((GRAFANA / "dashboard.json").read_text(encoding="utf-8"))
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_alert_has_a_section_that_says_what_to_do() -> None:
    sections = {title.lower() for title in re.findall(r"^### (Cachesvc\w+)$", METRICS_PAGE, re.MULTILINE)}
    alerts = {rule["alert"]: rule["annotations"]["runbook"] for rule in rules()}
    assert {name.lower() for name in alerts} == sections
    assert all(anchor == f"docs/metrics.md#{name.lower()}" for name, anchor in alerts.items())
    linked = set(re.findall(r"\(#(\w+)\)", METRICS_PAGE))
    assert linked <= sections


def test_operators_are_told_how_to_read_every_panel_and_where_every_alert_leads() -> None:
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    dashboard = json.loads((GRAFANA / "dashboard.json").read_text(encoding="utf-8"))
    titles = {panel["title"]: panel["type"] for panel in dashboard["panels"]}
    told = re.findall(r"(?<!\*)\*([A-Z][^*\n]+)\*(?!\*)", page)
    assert sorted(told) == sorted(title for title, kind in titles.items() if kind != "row")
    assert [title for title, kind in titles.items() if kind == "row" and f"**{title}**" not in page] == []
    assert [rule["alert"] for rule in rules() if f"(metrics.md#{rule['alert'].lower()})" not in page] == []


def test_prometheus_takes_the_rules() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    checked = subprocess.run(
        [promtool, "check", "rules", str(GRAFANA / "alerts.yaml")], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    fired = subprocess.run(
        [promtool, "test", "rules", str(ROOT / "tests/style/alerts_test.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert fired.returncode == 0, fired.stdout + fired.stderr
