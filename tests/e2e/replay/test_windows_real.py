"""The capacity run with a real engine works on shared memory, and finds the same answers with and without recycling."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.windows.real import SHARES
from tests.e2e.replay.test_benchmarks import run


def test_recycling_in_a_small_pool_changes_no_answer(tmp_path: Path) -> None:
    out = tmp_path / "windows.json"
    ended = run("windows.real", "--quick", "--json", str(out))
    assert ended.returncode == 0, ended.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [row["share"] for row in found["rows"]] == list(SHARES)
    for row in found["rows"]:
        off, on = row["off"], row["on"]
        assert row["answers_equal"] == found["settings"]["requests"]
        assert off["output_tokens"] == on["output_tokens"] > 0
        assert off["preemptions"] > 0, "the pool binds"
        assert off["recycled_pages"] == 0 < on["recycled_pages"]
        assert min(off["hit_tokens"], on["hit_tokens"]) > 0
        assert on["full_pages"] > off["full_pages"]
        for figures in (off, on):
            assert 0.9 < figures["page_bytes"] / found["settings"]["pool_bytes"] <= 1
    most = found["rows"][-1]
    assert most["on"]["mean_running"] > most["off"]["mean_running"]
