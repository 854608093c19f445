"""KV events of vLLM's own publisher: routers that look prompts up by tokens find what a match finds."""

from __future__ import annotations

import json
import os
import subprocess

from tests.e2e.rig import Node, running_node, short_folder
from tests.vllm.rig import PYTHON_VARIABLE, ROOT, engine_environment


def run(node: Node, seed: int, *, resets: float = 0) -> dict[str, int]:
    """What became of a run."""
    with short_folder() as folder:
        done = subprocess.run(
            [
                os.environ[PYTHON_VARIABLE],
                "-m",
                "tests.vllm.event_runs",
                node.socket,
                str(seed),
                str(folder),
                str(resets),
            ],
            cwd=ROOT,
            env=engine_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_an_index_of_vllms_events_is_what_a_match_finds() -> None:
    with running_node() as node:
        told = run(node, 1)
        assert told["requests"] == 1000
        assert min(told["device"], told["host"], told["events"]) > 50


def test_after_new_weights_nothing_older_is_announced() -> None:
    with running_node() as node:
        assert run(node, 2, resets=0.01)["requests"] == 1000
