"""The benchmarks run where they can, and say in one line why they cannot elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_ops.errors import CudaMissing
from gpu_ops.gpu import find_gpus
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


@pytest.mark.skipif(has_gpu(), reason="there is a GPU here")
@pytest.mark.parametrize(
    "arguments",
    [("swap", "--backend", "cuda"), ("fairness", "--backend", "cuda"), ("interference",), ("overlap",), ("attach",)],
    ids=lambda arguments: str(arguments[0]),
)
def test_without_a_gpu_a_benchmark_says_so(arguments: tuple[str, ...]) -> None:
    ended = run(*arguments)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"{arguments[0]}: ")
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stdout == ""


def test_swaps_on_shm_give_rows_that_add_up(tmp_path: Path) -> None:
    out = tmp_path / "swap.json"
    ended = run("swap", "--quick", "--pool-mib", "256", "--repeats", "1", "--json", str(out))
    assert ended.returncode == 0, ended.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["backend"] == "shm"
    assert {row["way"] for row in found["rows"]} == {"in", "out", "both"}
    for row in found["rows"]:
        assert row["ratio"] == pytest.approx(row["gb_per_s"] / row["plain_gb_per_s"], rel=1e-9)
        assert row["of_one_way"] == pytest.approx(row["gb_per_s"] / row["one_way_gb_per_s"], rel=1e-9)


def test_fairness_on_shm_gives_both_times(tmp_path: Path) -> None:
    out = tmp_path / "fairness.json"
    ended = run("fairness", "--rounds", "3", "--json", str(out))
    assert ended.returncode == 0, ended.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert 0 < found["alone_ms"] <= found["alone_worst_ms"]
    assert 0 < found["behind_ms"] <= found["behind_worst_ms"]
    assert found["ratio"] == pytest.approx(found["behind_ms"] / found["alone_ms"], rel=1e-9)
