"""Calls of vLLM's manager that the connector skips would have changed nothing."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.e2e.rig import running_node
from tests.vllm.long_cases import long
from tests.vllm.rig import PYTHON_VARIABLE, ROOT, engine_environment


@pytest.mark.parametrize("seed", [1, long(2)])
def test_a_request_that_has_room_and_fills_no_block_needs_nothing_of_vllm(seed: int) -> None:
    with running_node([]) as node:
        command = [os.environ[PYTHON_VARIABLE], "-m", "tests.vllm.allocations", node.socket, str(seed)]
        done = subprocess.run(command, cwd=ROOT, env=engine_environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout.splitlines()[-1])
        assert min(told["idle"], told["busy"], told["ended"]) >= 300
