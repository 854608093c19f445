"""The report of a replay: its JSON, its table, and that the picture shows what the numbers say."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from cachesvc_ctl.core.command import MissingExtraError, describe_bytes
from cachesvc_ctl.core.figure import DEVICE, HOST, RED, STORAGE
from cachesvc_lab.replay_report import (
    MAX_COLUMNS,
    LatencyHistogram,
    ReplayReport,
    Sample,
    draw_picture,
    gather_columns,
    report_json,
    report_table,
)
from matplotlib.colors import to_rgb
from matplotlib.image import imread

MIB = 1024**2


def timed(*latencies_ms: float) -> LatencyHistogram:
    histogram = LatencyHistogram()
    for latency_ms in latencies_ms:
        histogram.record(latency_ms)
    return histogram


SAMPLES = (Sample(0, 10, 5, 1, 84, 3 * MIB, 40 * MIB), Sample(1, 50, 20, 4, 26, 12 * MIB, 9 * MIB))

REPORT = ReplayReport(
    trace="small.jsonl",
    engines=4,
    pool_blocks=3417,
    host_blocks=10_000,
    policy="lru",
    block_bytes=2 * MIB,
    requests=1200,
    blocks=200,
    device_hits=60,
    host_hits=25,
    storage_hits=5,
    computed=110,
    evictions=77,
    h2d_bytes=15 * MIB,
    d2h_bytes=49 * MIB,
    seconds=2.5,
    verified_pages=31,
    kills=1,
    settings={"seed": 7},
    rpc={"Match": timed(*[0.5] * 99, 80.0, 80.0), "Swap": LatencyHistogram()},
    samples=SAMPLES,
)


def share_of(picture: npt.NDArray[np.float32], color: str) -> float:
    """Share of the picture that has just this colour."""
    return float(np.isclose(picture[:, :, :3], to_rgb(color), atol=0.004).all(axis=2).mean())


def drawn(report: ReplayReport, folder: Path) -> npt.NDArray[np.float32]:
    draw_picture(report, folder / "replay.png")
    return imread(folder / "replay.png")


def test_the_json_says_what_the_report_says() -> None:
    document = json.loads(report_json(REPORT))
    rpc = document.pop("rpc_ms")
    assert document == {
        "trace": "small.jsonl",
        "engines": 4,
        "pool_blocks": 3417,
        "host_blocks": 10_000,
        "policy": "lru",
        "block_bytes": 2 * MIB,
        "settings": {"seed": 7},
        "requests": 1200,
        "blocks": 200,
        "hits": {"device": 60, "host": 25, "storage": 5},
        "hit_ratio": 0.45,
        "computed": 110,
        "evictions": 77,
        "bytes": {"h2d": 15 * MIB, "d2h": 49 * MIB},
        "seconds": 2.5,
        "verified_pages": 31,
        "corrupt_pages": 0,
        "kills": 1,
        "conservation": "ok",
        "samples": {
            "t_seconds": [0, 1],
            "device_hits": [10, 50],
            "host_hits": [5, 20],
            "storage_hits": [1, 4],
            "computed": [84, 26],
            "h2d_bytes": [3 * MIB, 12 * MIB],
            "d2h_bytes": [40 * MIB, 9 * MIB],
        },
    }
    assert rpc["Match"]["count"] == 101
    assert rpc["Match"]["p50"] == pytest.approx(0.5, rel=0.024)
    assert rpc["Match"]["p99"] == pytest.approx(80.0, rel=0.024)
    assert rpc["Swap"] == {"p50": None, "p99": None, "count": 0}


def test_a_replay_of_nothing_is_a_report_too() -> None:
    empty = ReplayReport(
        trace="t", engines=1, pool_blocks=0, policy="lru", block_bytes=1, requests=0, blocks=0,
        device_hits=0, computed=0, evictions=0, seconds=0.0,
    )  # fmt: skip
    assert json.loads(report_json(empty))["hit_ratio"] == 0.0
    assert "hit ratio" in report_table(empty)


def test_the_table_is_aligned_and_holds_the_numbers() -> None:
    table = report_table(REPORT)
    lines = table.splitlines()
    assert all(line == line.rstrip() for line in lines)
    assert "device pool  3,417 blocks of 2.00 MiB (6.67 GiB)" in lines
    assert "seed         7" in lines
    words = {line.strip().split("  ")[0]: line.split() for line in lines if line}
    assert words["hit on device"][-2:] == ["60", "30.00%"]
    assert words["computed"][-2:] == ["110", "55.00%"]
    assert words["hit ratio"][-1] == "45.00%"
    assert words["device to host"][-2:] == ["49.00", "MiB"]
    assert words["conservation"][-1] == "ok"
    assert words["Swap"] == ["Swap", "0", "-", "-", "-"]
    ends = {len(line) for line in lines if line.endswith("%")}
    assert len(ends) == 1


def test_what_broke_stands_in_the_table() -> None:
    broken = replace(REPORT, conservation="device pool: 3 pages are in no place", corrupt_pages=2, computed=100)
    table = report_table(broken)
    assert not broken.is_sound
    assert "BROKEN" in table
    assert "device pool: 3 pages are in no place" in table
    assert "NOT SOUND" in table
    assert broken.lost_blocks == 10
    assert "neither (cut off)" in table
    assert REPORT.is_sound
    assert "neither" not in report_table(REPORT)


def test_a_tier_that_is_not_there_has_no_line() -> None:
    assert "hit in storage" in report_table(REPORT)
    assert "hit in storage" not in report_table(replace(REPORT, storage_hits=0, computed=115))


@pytest.mark.parametrize("change", [{"evictions": -1}, {"seconds": float("nan")}, {"seconds": float("inf")}])
def test_a_number_that_cannot_be_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(REPORT, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [1, 7, MAX_COLUMNS, MAX_COLUMNS + 1, 3600])
def test_columns_hold_every_sample_once(seconds: int) -> None:
    samples = [Sample(5 + second, device_hits=second, d2h_bytes=1) for second in range(0, seconds, 3)]
    columns, width_seconds = gather_columns(samples)
    assert len(columns) <= MAX_COLUMNS
    assert sum(column.device_hits for column in columns) == sum(sample.device_hits for sample in samples)
    assert sum(column.d2h_bytes for column in columns) == len(samples)
    edges = [column.t_seconds for column in columns]
    assert edges == list(range(5, 5 + len(columns) * width_seconds, width_seconds))
    assert gather_columns([]) == ([], 1)


def test_the_picture_shows_the_tiers_in_proportion(tmp_path: Path) -> None:
    quarters = tuple(Sample(second, 50, 25, 10, 15) for second in range(20))
    report = replace(REPORT, samples=quarters, rpc={})
    picture = drawn(report, tmp_path)
    device, host, storage = (share_of(picture, color) for color in (DEVICE, HOST, STORAGE))
    assert device > 0.05
    assert host / device == pytest.approx(0.5, abs=0.03)
    assert storage / device == pytest.approx(0.2, abs=0.03)


def test_the_picture_warns_of_what_is_not_sound(tmp_path: Path) -> None:
    quiet = replace(REPORT, rpc={}, samples=())
    assert share_of(drawn(quiet, tmp_path), RED) == 0.0
    assert share_of(drawn(replace(quiet, corrupt_pages=1), tmp_path), RED) > 0.0
    assert share_of(drawn(replace(quiet, conservation="lost"), tmp_path), RED) > 0.0


@pytest.mark.parametrize(
    "change",
    [
        {"samples": (Sample(4, device_hits=1),)},
        {"samples": (Sample(0, h2d_bytes=1), Sample(90_000, d2h_bytes=1 << 45))},
        {"rpc": {f"Rpc{number}": timed(0.0, number) for number in range(30)}},
        {"trace": "$a_{b}$ " * 40, "policy": "$\\frac$"},
    ],
    ids=["one_hit", "a_day", "many_rpcs", "odd_names"],
)
def test_odd_replays_are_drawn_at_the_same_size(tmp_path: Path, change: dict[str, object]) -> None:
    usual = drawn(REPORT, tmp_path)
    odd = drawn(replace(REPORT, **change), tmp_path)  # type: ignore[arg-type]
    assert odd.shape == usual.shape
    assert not np.array_equal(odd, usual)


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # what an import finds where nothing is installed
    with pytest.raises(MissingExtraError, match=r"\[replay\]"):
        draw_picture(REPORT, tmp_path / "replay.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 * MIB, "1.50 GiB"),
        (3 * 1024**4, "3.00 TiB"),
        (5000 * 1024**4, "5,000.00 TiB"),
    ],
)
def test_bytes_are_told_in_a_readable_unit(count: int, words: str) -> None:
    assert describe_bytes(count) == words
