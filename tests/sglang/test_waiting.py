"""Requests that wait are matched ahead of their turn; of one that is aborted meanwhile nothing is left."""

from __future__ import annotations

import json
import os
import subprocess

from tests.e2e.rig import running_node
from tests.sglang.rig import PYTHON_VARIABLE, python_path


def test_nothing_is_kept_of_a_request_that_is_aborted_before_its_match_was_sent() -> None:
    environment = {**os.environ, "PYTHONPATH": python_path(), "SGLANG_USE_CPU_ENGINE": "1", "PYTHONWARNINGS": "ignore"}
    with running_node() as node:
        command = [os.environ[PYTHON_VARIABLE], "-m", "tests.sglang.waiting_cache", node.socket]
        ended = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True)
    assert json.loads(ended.stdout.splitlines()[-1]) == {"left": []}, "it would be matched, and pin its hit for good"
