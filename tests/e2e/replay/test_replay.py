"""``cachesvc replay``: its numbers agree with an oracle to the block, and no hit ever has wrong bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from cachesvc_lab.grid import Cell, run_cell
from cachesvc_lab.traces import (
    DEFAULT_BLOCK_TOKENS,
    SyntheticTraceSpec,
    TraceRequest,
    prompts_of,
    read_trace,
    write_synthetic_trace,
)

from tests.e2e.remote import ROOT
from tests.forked_command import run_forked
from tests.long_cases import long
from tests.oracle import CacheCounts, distinct_blocks, infinite_hits, lru_hits, pool_capacity

TRACES = Path(os.environ.get("CACHESVC_TRACES", ROOT.parent / "shared" / "traces"))
REAL = sorted(TRACES.glob("*.jsonl*")) if TRACES.is_dir() else []
LIMIT = 400
BLOCK_BYTES = 512
KEYS = {
    "requests", "blocks", "hits", "hit_ratio", "computed", "evictions", "bytes", "rpc_ms", "seconds", "verified_pages",
    "corrupt_pages", "kills", "conservation",
}  # fmt: skip


def replay(folder: Path, trace: Path, *arguments: str) -> dict[str, Any]:
    """The report of one replay with a daemon of its own."""
    out = folder / "report.json"
    more = ("--json", str(out), "--block-bytes", str(BLOCK_BYTES))
    ended = run_forked("cachesvc_ctl", "replay", str(trace), *more, *arguments)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    report = json.loads(out.read_text(encoding="utf-8"))
    assert isinstance(report, dict)
    return report


def assert_agrees(report: dict[str, Any], counts: CacheCounts) -> None:
    """One engine and no host: every number is determined."""
    assert report["requests"] == counts.requests
    assert report["blocks"] == counts.blocks
    assert report["hits"] == {"device": counts.hits, "host": 0, "storage": 0}
    assert report["computed"] == counts.computed
    assert report["evictions"] == counts.evictions
    assert report["hit_ratio"] == pytest.approx(counts.hits / counts.blocks)
    assert report["verified_pages"] == counts.hits
    assert_sound(report)
    assert report["bytes"] == {"h2d": 0, "d2h": 0}
    assert report["kills"] == 0


def assert_sound(report: dict[str, Any]) -> None:
    """Every page held what it should, and every page is in one place."""
    assert report["corrupt_pages"] == 0
    assert report["conservation"] == "ok"


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[TraceRequest]]:
    """A trace of chats, and its requests."""
    path = tmp_path_factory.mktemp("synthetic") / "synthetic.jsonl"
    write_synthetic_trace(path, SyntheticTraceSpec(requests=300, seed=7))
    return path, list(read_trace(path))


@pytest.mark.parametrize("percent", [2, 10, 50])
def test_a_synthetic_trace_counts_as_the_oracle_does(
    synthetic: tuple[Path, list[TraceRequest]], tmp_path: Path, percent: int
) -> None:
    path, requests = synthetic
    capacity = pool_capacity(distinct_blocks(requests), percent)
    report = replay(tmp_path, path, "--device-blocks", f"{percent}%")
    assert report["pool_blocks"] == capacity
    assert_agrees(report, lru_hits(requests, capacity))
    assert report["evictions"] > 0


def test_a_pool_that_holds_everything_counts_as_an_infinite_one(
    synthetic: tuple[Path, list[TraceRequest]], tmp_path: Path
) -> None:
    path, requests = synthetic
    report = replay(tmp_path, path, "--device-blocks", "100%")
    assert_agrees(report, infinite_hits(requests))
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not REAL, reason=f"no traces in {TRACES}; name their folder in CACHESVC_TRACES")
@pytest.mark.parametrize("percent", [2, long(10), 50])
@pytest.mark.parametrize("trace", REAL, ids=lambda path: path.name.split(".")[0])
def test_a_real_trace_counts_as_the_oracle_does(trace: Path, percent: int, tmp_path: Path) -> None:
    requests = list(read_trace(trace, limit=LIMIT))
    capacity = pool_capacity(distinct_blocks(requests), percent)
    report = replay(tmp_path, trace, "--limit", str(LIMIT), "--device-blocks", f"{percent}%")
    assert_agrees(report, lru_hits(requests, capacity))


def test_killing_engines_loses_no_request_and_corrupts_no_page(tmp_path: Path) -> None:
    path = tmp_path / "synthetic.jsonl"
    write_synthetic_trace(path, SyntheticTraceSpec(requests=1200, seed=3))
    requests = list(read_trace(path))
    report = replay(
        tmp_path, path, "--engines", "4", "--device-blocks", "2%", "--host-blocks", "10%", "--kill-every", "1"
    )  # fmt: skip
    assert_sound(report)
    assert report["kills"] > 0
    assert report["requests"] == len(requests)
    assert report["blocks"] == sum(len(request.block_ids) for request in requests)
    assert sum(report["hits"].values()) + report["computed"] == report["blocks"]
    assert report["hits"]["host"] > 0
    assert report["bytes"]["h2d"] > 0
    assert report["bytes"]["d2h"] > 0
    assert report["bytes"]["h2d"] % BLOCK_BYTES == 0


def test_killing_daemons_loses_no_request_and_what_was_stored_is_hit(tmp_path: Path) -> None:
    path = tmp_path / "synthetic.jsonl"
    write_synthetic_trace(path, SyntheticTraceSpec(requests=600, seed=5))
    requests = list(read_trace(path))
    spec = f"file:{tmp_path}/cache?capacity=64MiB&floor=0&write=through&wait=5s"
    pools = ("--device-blocks", "10%", "--host-blocks", "50%", "--write-policy", "write_through")
    report = replay(tmp_path, path, *pools, "--engines", "2", "--storage", spec, "--restart-every", "2")
    assert_sound(report)
    assert report["settings"]["restarts"] > 0
    assert report["requests"] == len(requests)
    assert sum(report["hits"].values()) + report["computed"] == report["blocks"]
    assert report["hits"]["storage"] > 0


def test_two_nodes_hit_what_the_other_one_has(tmp_path: Path) -> None:
    path = tmp_path / "synthetic.jsonl"
    write_synthetic_trace(path, SyntheticTraceSpec(requests=300, seed=6))
    requests = list(read_trace(path))
    pools = ("--device-blocks", "20%", "--host-blocks", "50%", "--write-policy", "write_through")
    report = replay(tmp_path, path, *pools, "--engines", "2", "--nodes", "2")
    assert_sound(report)
    assert report["settings"]["nodes"] == 2
    assert report["requests"] == len(requests)
    assert sum(report["hits"].values()) + report["computed"] == report["blocks"]
    assert report["hits"]["storage"] > 0


def test_what_two_nodes_cannot_do_is_said(tmp_path: Path) -> None:
    path = tmp_path / "synthetic.jsonl"
    write_synthetic_trace(path, SyntheticTraceSpec(requests=10, seed=6))
    done = run_forked("cachesvc_ctl", "replay", str(path), "--nodes", "2")
    assert done.returncode != 0
    assert "--host-blocks" in done.stderr


@pytest.mark.parametrize("policy", ["write_back", "write_through", "write_through_selective"])
def test_the_host_tier_adds_hits(synthetic: tuple[Path, list[TraceRequest]], tmp_path: Path, policy: str) -> None:
    path, every = synthetic
    requests = every[:150]
    pools = ("--device-blocks", "5%", "--host-blocks", "50%", "--layers", "4")
    report = replay(tmp_path, path, "--limit", "150", *pools, "--write-policy", policy)
    assert_sound(report)
    device_alone = lru_hits(requests, pool_capacity(distinct_blocks(requests), 5)).hits
    assert device_alone < sum(report["hits"].values()) <= infinite_hits(requests).hits
    assert report["hits"]["host"] > 0


@pytest.mark.parametrize("eviction", ["lru", "hazard"])
def test_in_the_traces_time_it_hits_what_a_simulation_does(
    synthetic: tuple[Path, list[TraceRequest]], tmp_path: Path, eviction: str
) -> None:
    path, requests = synthetic
    prompts = prompts_of(path.name, requests, DEFAULT_BLOCK_TOKENS)
    device, host = (pool_capacity(distinct_blocks(requests), percent) for percent in (5, 20))
    flags = ("--device-blocks", str(device), "--eviction", eviction, "--clock", "trace")
    alone = replay(tmp_path, path, *flags)
    assert_sound(alone)
    simulated = run_cell(prompts, Cell(eviction, "write_back", device, 0))
    slack = 0.0 if eviction == "lru" else 0.01 * simulated.blocks  # the daemon learns between calls, at its leisure
    assert alone["hits"]["device"] == pytest.approx(simulated.device_hits, abs=slack)
    both = replay(tmp_path, path, *flags, "--host-blocks", str(host))
    assert_sound(both)
    assert both["hits"]["host"] > 0
    expected = run_cell(prompts, Cell(eviction, "write_back", device, host)).hit_ratio
    assert both["hit_ratio"] == pytest.approx(expected, abs=0.01), "copies take some time, and evictions turns"


def test_the_report_has_the_keys_that_are_promised(synthetic: tuple[Path, list[TraceRequest]], tmp_path: Path) -> None:
    path, _ = synthetic
    report = replay(tmp_path, path, "--limit", "20", "--device-blocks", "50%")
    assert report.keys() >= KEYS
    assert report["hits"].keys() == {"device", "host", "storage"}
    assert report["bytes"].keys() == {"h2d", "d2h"}
    assert {"match", "allocate", "publish", "release"} <= report["rpc_ms"].keys()
    for numbers in report["rpc_ms"].values():
        assert numbers.keys() == {"p50", "p99", "count"}
        assert 0 < numbers["p50"] <= numbers["p99"]
    assert report["rpc_ms"]["match"]["count"] == report["requests"] == 20
    assert report["seconds"] > 0
