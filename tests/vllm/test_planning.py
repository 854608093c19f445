"""vLLM's own plans for the caches of published models are those that the daemon's layouts are tested with."""

from __future__ import annotations

import os
import subprocess

from tests.vllm.rig import PYTHON_VARIABLE, ROOT, engine_environment


def test_the_installed_vllm_plans_as_recorded() -> None:
    command = [os.environ[PYTHON_VARIABLE], "-m", "tests.vllm.planning"]
    done = subprocess.run(command, cwd=ROOT, env=engine_environment(), stdout=subprocess.PIPE, text=True, check=True)
    plans = [line for line in done.stdout.splitlines() if line.startswith("{")]
    recorded = (ROOT / "tests/vllm/plans.jsonl").read_text(encoding="utf-8").splitlines()
    assert plans == recorded, "record the plans anew: python -m tests.vllm.planning"
