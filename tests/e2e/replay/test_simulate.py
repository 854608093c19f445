"""Command ``cachesvc simulate``: its rows, its table, its picture, and its errors for bad flags."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from cachesvc_lab.traces import SyntheticTraceSpec, read_trace, write_synthetic_trace

from tests.e2e.engine import Engine, prompt
from tests.e2e.replay.test_replay import LIMIT, REAL, TRACES
from tests.e2e.rig import running_node
from tests.forked_command import run_forked
from tests.oracle import distinct_blocks, lru_hits, pool_capacity

KEYS = {"policy", "write_policy", "device_blocks", "host_blocks", "requests", "blocks", "hits", "seconds"}


def ctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_forked("cachesvc_ctl", *arguments)


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return ctl("simulate", *arguments)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("simulate") / "chats.jsonl"
    write_synthetic_trace(path, SyntheticTraceSpec(requests=200, seed=5))
    return path


def test_rows_have_what_is_promised_and_count_as_the_oracle(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    sizes = ("--device-blocks", "20,10%", "--host-blocks", "0,30%")
    ended = simulate(str(trace), "--policies", "lru,opt", *sizes, "--processes", "2", "--json", str(out))
    assert ended.returncode == 0, ended.stderr
    requests = list(read_trace(trace))
    distinct = distinct_blocks(requests)
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        assert row.keys() >= KEYS
        assert row["requests"] == 200
        assert row["blocks"] == sum(len(request.block_ids) for request in requests)
        assert row["seconds"] > 0
    assert {row["device_blocks"] for row in rows} == {20, pool_capacity(distinct, 10)}
    assert {row["host_blocks"] for row in rows} == {0, pool_capacity(distinct, 30)}
    for row in rows:
        if row["policy"] == "lru" and not row["host_blocks"]:
            assert row["hits"] == {"device": lru_hits(requests, row["device_blocks"]).hits, "host": 0, "disk": 0}
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "together" in ended.stdout
    assert "requests a minute" in ended.stderr


def test_several_traces_and_sizes_in_bytes(trace: Path, tmp_path: Path) -> None:
    other = tmp_path / "others.jsonl"
    write_synthetic_trace(other, SyntheticTraceSpec(requests=50, seed=6))
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    pools = ("--block-bytes", "64MiB", "--device-blocks", "4GiB", "--host-blocks", "0,8GiB,16GiB")
    ended = simulate(str(trace), str(other), *pools, "--limit", "40", "--json", str(out), "--picture", str(picture))
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert {row["trace"] for row in rows} == {trace.name, other.name}
    assert {row["host_blocks"] for row in rows} == {0, 128, 256}
    assert {row["requests"] for row in rows} == {40}
    assert "64 (4.00 GiB)" in ended.stdout
    assert picture.is_file()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--policies", "lru,mru"], "--policies: there is no 'mru'"),
        (["--write-policies", "never"], "--write-policies: there is no 'never'"),
        (
            ["--device-blocks", "many"],
            "'many' is not a number of blocks, such as 5000, a share, such as 10%, or a size",
        ),
        (["--device-blocks", "0"], "--device-blocks must be at least 1"),
        (["--host-blocks", "64GiB"], "--block-bytes"),
        (["--block-bytes", "0"], "at least one byte"),
        (["--block-bytes", "big"], "is not a size"),
        (["--processes", "0"], "'0' is not a number from 1"),
    ],
)
def test_a_bad_flag_is_named(trace: Path, flags: list[str], words: str) -> None:
    ended = simulate(str(trace), *flags)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_trace_that_is_not_there_is_named() -> None:
    ended = simulate("/no/such/trace.jsonl")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "there is no such file" in ended.stderr


@pytest.mark.skipif(not REAL, reason=f"no traces in {TRACES}; name their folder in CACHESVC_TRACES")
@pytest.mark.parametrize("trace", REAL, ids=lambda path: path.name.split(".")[0])
def test_a_real_trace_counts_as_the_oracle_does(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    flags = ("--policies", "lru", "--device-blocks", "1%,10%,50%", "--limit", str(LIMIT))
    ended = simulate(str(trace), *flags, "--json", str(out))
    assert ended.returncode == 0, ended.stderr
    requests = list(read_trace(trace, limit=LIMIT))
    for row in json.loads(out.read_text(encoding="utf-8"))["rows"]:
        assert row["hits"]["device"] == lru_hits(requests, row["device_blocks"]).hits


def test_the_last_requests_of_a_daemon_are_a_trace(tmp_path: Path) -> None:
    trace, out = tmp_path / "recent.jsonl.zst", tmp_path / "rows.json"
    with running_node() as node, Engine(node.socket, device_pages=16) as engine:
        tokens = engine.registration.layout.block_tokens
        for seed, blocks in ((1, 4), (2, 3), (1, 2), (1, 4)):
            engine.serve(prompt(seed, blocks))
        dumped = ctl("dump", str(trace), "--requests", "--socket", node.socket)
        named = ctl("dump", str(tmp_path / "recent.json"), "--requests", "--socket", node.socket)
    assert dumped.returncode == 0, dumped.stderr
    assert dumped.stdout.startswith(f"4 requests, for --block-tokens {tokens}, in {trace}")
    assert (named.returncode, "ends in .jsonl" in named.stderr, list(tmp_path.iterdir())) == (2, True, [trace])
    requests = list(read_trace(trace, block_tokens=tokens))
    assert [request.block_ids for request in requests] == [(0, 1, 2, 3), (4, 5, 6), (0, 1), (0, 1, 2, 3)]
    times = [request.timestamp_ms for request in requests]
    assert times == sorted(times)
    assert times[0] == 0
    ended = simulate(
        str(trace),
        "--block-tokens",
        str(tokens),
        "--policies",
        "lru,opt",
        "--device-blocks",
        "4,16",
        "--json",
        str(out),
    )
    assert ended.returncode == 0, ended.stderr
    hits = {
        (row["policy"], row["device_blocks"]): row["hits"]["device"]
        for row in json.loads(out.read_text(encoding="utf-8"))["rows"]
    }
    assert hits == {("lru", 4): 3, ("opt", 4): 3, ("lru", 16): 6, ("opt", 16): 6}
