"""vLLM's block pool is no public API: what the connector takes the place of is as the installed release has it."""

from __future__ import annotations

import json
import os
import subprocess

from tests.vllm.rig import PYTHON_VARIABLE, ROOT, engine_environment


def test_the_installed_vllm_has_what_the_connector_replaces_and_implements() -> None:
    command = [os.environ[PYTHON_VARIABLE], "-m", "tests.vllm.signatures"]
    done = subprocess.run(command, cwd=ROOT, env=engine_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
