"""The benchmarks run where they can, and say in one line why they cannot elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from cachesvc_lab.traces import SyntheticTraceSpec, write_synthetic_trace

from gpu_ops.driver import CudaMissing
from gpu_ops.gpu import find_gpus
from tests.long_cases import IS_LONG
from tests.style.tree import ROOT


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One benchmark as a process of its own."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=300)


def has_gpu() -> bool:
    """True where a GPU is visible."""
    try:
        return bool(find_gpus())
    except CudaMissing:
        return False


def test_a_simulation_says_what_policies_hit_and_how_fast(tmp_path: Path) -> None:
    trace, out = tmp_path / "chats.jsonl", tmp_path / "out.json"
    write_synthetic_trace(trace, SyntheticTraceSpec(requests=80, seed=2))
    ended = run("ledger.simulation", str(trace), "--json", str(out))
    assert ended.returncode == 0, ended.stderr
    (found,) = json.loads(out.read_text(encoding="utf-8"))["traces"]
    assert (found["trace"], found["requests"], len(found["rows"])) == ("chats", 80, 6)
    assert all(row["hits"]["lru"] <= row["hits"]["opt"] for row in found["rows"])
    assert all(row["hits"]["hazard"] <= row["hits"]["opt"] for row in found["rows"])
    assert min(found["requests_per_minute"].values()) > 0


@pytest.mark.skipif(has_gpu(), reason="there is a GPU here")
@pytest.mark.parametrize(
    "arguments",
    [
        ("swap", "--backend", "cuda"),
        ("swap.fairness", "--backend", "cuda"),
        ("gpus", "--backend", "cuda"),
        ("attach.interference",),
        ("swap.overlap",),
        ("attach",),
        ("storage.ttft",),
    ],
    ids=lambda arguments: str(arguments[0]),
)
def test_without_a_gpu_a_benchmark_says_so(arguments: tuple[str, ...]) -> None:
    ended = run(*arguments)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"{arguments[0].rpartition('.')[2]}: ")
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stdout == ""


def test_swaps_on_shm_give_rows_that_add_up(tmp_path: Path) -> None:
    out = tmp_path / "swap.json"
    ended = run("swap", "--quick", "--pool-mib", "64", "--repeats", "1", "--json", str(out))
    assert ended.returncode == 0, ended.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["backend"] == "shm"
    assert {row["way"] for row in found["rows"]} == {"in", "out", "both"}
    for row in found["rows"]:
        assert row["ratio"] == pytest.approx(row["gb_per_s"] / row["plain_gb_per_s"], rel=1e-9)
        assert row["of_one_way"] == pytest.approx(row["gb_per_s"] / row["one_way_gb_per_s"], rel=1e-9)


def test_fairness_on_shm_gives_both_times(tmp_path: Path) -> None:
    out = tmp_path / "fairness.json"
    ended = run("swap.fairness", "--rounds", "1", "--json", str(out))
    assert ended.returncode == 0, ended.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert 0 < found["alone_ms"] <= found["alone_worst_ms"]
    assert 0 < found["behind_ms"] <= found["behind_worst_ms"]
    assert found["ratio"] == pytest.approx(found["behind_ms"] / found["alone_ms"], rel=1e-9)


def test_two_devices_at_once_on_shm_give_every_part(tmp_path: Path) -> None:
    out = tmp_path / "gpus.json"
    most = ("--parts", "copies", "peers", "urgent", "calls", "kill")  # a mover that hangs takes 36 s
    parts = () if IS_LONG else most
    ended = run("gpus", "--quick", "--mib", "8", "--repeats", "1", "--json", str(out), *parts)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["gpus"] == 2
    rows = found["copies"]["rows"]
    assert {(row["kind"], row["way"]) for row in rows} == set(product(("ranks", "replicas"), ("in", "out", "both")))
    for row in rows:
        assert row["copy_bytes"] == (4 if row["way"] == "both" else 2) * 8 << 20
        assert row["time_ratio"] == pytest.approx(row["plain_gb_per_s"] / row["gb_per_s"], rel=1e-9)
        assert row["of_one"] == pytest.approx(row["gb_per_s"] / row["one_gb_per_s"], rel=1e-9)
        assert min(row["daemon_ms_per_gib"], row["mover_ms_per_gib"]) > 0
    (shared,) = found["peers"]["rows"]
    assert shared["mib"] == 8
    assert min(rate for name, rate in shared.items() if name.endswith("gb_per_s")) > 0
    for name in ("step", "match"):
        figures = found["calls"][name]
        assert figures["calls"] >= 512
        assert figures["ratio"]["p99"] == pytest.approx(figures["beside"]["p99"] / figures["idle"]["p99"], rel=1e-9)
    assert found["calls"]["gb_per_s"] > 0
    killed = found["kill"]
    assert 0 < killed["told_s"] < killed["again_s"]
    (other,) = killed["others"]
    assert min(other[name] for name in ("before", "during", "after")) > 0


def test_a_prefix_comes_from_every_tier_on_shm(tmp_path: Path) -> None:
    out = tmp_path / "ttft.json"
    small = ("--backend", "shm", "--prefix", "256", "--new", "64", "--repeats", "2", "--folder", str(tmp_path))
    ended = run("storage.ttft", *small, "--json", str(out))
    assert ended.returncode == 0, ended.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    rows = {row["tier"]: row for row in found["rows"]}
    assert {"device", "host", "file", "peer", "recompute", "mooncake"} == set(rows) | set(found["left_out"])
    for tier in ("host", "file", "peer"):
        row = rows[tier]
        assert row["matched_p50_ms"] <= row["loaded_p50_ms"] <= row["loaded_max_ms"] <= row["after_max_ms"]
        assert row["gb_per_s"] == pytest.approx(found["prefix_bytes"] / row["loaded_p50_ms"] / 1e6, rel=0.05, abs=0.006)
    assert [each.name for each in tmp_path.iterdir()] == ["ttft.json"], "its folder is gone"
