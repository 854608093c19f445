"""The table of round trips: recorded by both ways, or by gRPC alone as it was before there were lanes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import results, tables

MACHINE = {"cpu": "none", "cores": "2", "kernel": "6", "python": "3.11", "date": "2026-01-01"}


def figures(ms: float, **more: Any) -> dict[str, Any]:
    pair = {"p50": ms, "p99": 2 * ms}
    return {
        "ping_ms": pair,
        "match_ms": {"1024": {"keys_ready": pair, "with_hashing": pair}},
        "step_ms": {"32": pair},
        "step_publish_ms": {"32": pair},
        **more,
    }


def shown(folder: Path, monkeypatch: pytest.MonkeyPatch, recorded: dict[str, Any]) -> str:
    (folder / "rpc.json").write_text(json.dumps({"machine": MACHINE, **recorded}), encoding="utf-8")
    monkeypatch.setattr(results, "RESULTS", folder)
    return tables.rpc()


def test_each_way_has_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    window = {"match_window_ms": {"1024": {"keys_ready": {"p50": 7.0, "p99": 8.0}}}}
    both = {
        way: {
            **figures(ms),
            "by_clients": {"1": figures(ms, **window)},
            "without_swaps": figures(ms / 2, **window),
            "step_paced_ms": {"16": {"p50": 9.0, "p99": 10.0}},
        }
        for way, ms in (("lane", 0.25), ("grpc", 4.0))
    }
    text = shown(tmp_path, monkeypatch, {"loop_longest_ms": None, **both})
    assert "| lane: ping | 0.12 / 0.2 | 0.25 / 0.5 |" in text
    assert "| grpc: Step, 32 grow and publish | 2.00 / 4.0 | 4.00 / 8.0 |" in text
    assert "| lane: Match 1k tokens, one window, keys ready | 7.00 / 8.0 | 7.00 / 8.0 |" in text
    assert "| grpc: Step, 32 grow and publish, 16 engines each 10 ms | - | 9.00 / 10.0 |" in text


def test_what_was_recorded_before_there_were_lanes_is_shown_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(tmp_path, monkeypatch, {**figures(1.0), "by_clients": {"4": figures(3.0)}})
    assert "| ping | 3.00 / 6.0 |" in text
    assert "lane" not in text
