"""vLLM's scheduler on the daemon's pages, thousands of steps a second: each token's page is looked at when it is read,
nothing is kept of requests that have ended, and whatever happens, requests end."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping

import pytest

from tests.e2e.rig import Node, running_node, short_folder
from tests.vllm.rig import PYTHON_VARIABLE, ROOT, engine_environment

LARGE_PAGES = ("--device-pool", "1GiB", "--host-pool", "2GiB")


def run(name: str, node: Node, seed: int) -> Mapping[str, int]:
    """What became of a run. The daemon suffers what it asks for."""
    process = subprocess.Popen(
        [os.environ[PYTHON_VARIABLE], "-m", "tests.vllm.scheduling_runs", name, node.socket, str(seed)],
        cwd=ROOT,
        env=engine_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    suffer = {"@kill": node.daemon.kill, "@start": node.daemon.start}
    told = ""
    with process:
        for line in process.stdout:
            if line.strip() in suffer:
                suffer[line.strip()]()
                process.stdin.write("done\n")
                process.stdin.flush()
            else:
                told = line
    assert process.returncode == 0
    found: Mapping[str, int] = json.loads(told)
    return found


@pytest.mark.parametrize("name", ["plain", "async", "drafts", "resets"])
def test_each_page_holds_what_was_computed_and_nothing_is_kept(name: str) -> None:
    with running_node() as node:
        told = run(name, node, 1)
        assert min(told["loads"], told["preempted"]) >= 10
        assert told["failed_loads"] == 0


@pytest.mark.parametrize("name", ["plain", "async", "failing"])
def test_requests_whose_loads_fail_are_computed_or_end_as_vllm_is_told(name: str) -> None:
    with running_node(["--fault-copies", "0.2"]) as node:
        assert run(name, node, 2)["failed_loads"] >= 10


@pytest.mark.parametrize("name", ["tight", "tight-async"])
def test_engines_that_have_each_what_the_others_wait_for_go_on(name: str) -> None:
    with running_node() as node:
        assert run(name, node, 1)["whole"] == 200


def test_an_engine_whose_daemon_dies_while_requests_are_loaded_goes_on_with_the_next() -> None:
    with short_folder() as folder, running_node(LARGE_PAGES, folder=folder) as node:
        assert run("die-while-loading", node, 1)["failed_loads"] >= 1


@pytest.mark.parametrize("name", ["deaths", "deaths-async"])
def test_requests_end_well_however_often_the_daemon_dies(name: str) -> None:
    with short_folder() as folder, running_node(folder=folder) as node:
        assert run(name, node, 1)["whole"] >= 50
