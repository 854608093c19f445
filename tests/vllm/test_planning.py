"""vLLM's own plans for the caches of published models are those that the daemon's layouts are tested with."""

from __future__ import annotations

from tests.vllm.rig import ROOT, forker


def test_the_installed_vllm_plans_as_recorded() -> None:
    plans = [line for line in forker().run("tests.vllm.planning") if line.startswith("{")]
    recorded = (ROOT / "tests/vllm/plans.jsonl").read_text(encoding="utf-8").splitlines()
    assert plans == recorded, "record the plans anew: python -m tests.vllm.planning"
