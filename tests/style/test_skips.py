"""A skip fails CI's run unless its reason is listed, and each goal that makes up for a skip is run by CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import NOWHERE_IN_CI, RUN_BY, unlisted
from tests.style.tree import ROOT

SKIPPING = """
import pytest
pytest.importorskip("no_such_module_1", reason="{whole}")
"""
SKIPS_ONE = """
import pytest
def test_passes(): pass
def test_skips(): pytest.skip("{one}")
@pytest.mark.xfail
def test_fails_as_expected(): assert False
"""


def test_a_goal_may_not_skip_what_it_is_there_for() -> None:
    reasons = {
        "a": "storage needs Mooncake, which cannot be loaded",
        "b": "this machine has no NVIDIA driver",
        "c": "later",
    }
    assert unlisted(reasons, "test") == {"c": "later"}
    assert unlisted(reasons, "mooncake-test").keys() == {"a", "c"}


def test_ci_runs_each_goal_that_makes_up_for_a_skip() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert [goal for goal in RUN_BY.values() if f"make {goal}" not in script] == []
    assert "export CACHESVC_SKIPS=listed" in script
    assert all(why for why in NOWHERE_IN_CI.values())


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize(
    ("whole", "one", "code"),
    [
        ("torch is not installed", "this machine has no helm", 0),
        ("torch is not installed", "not today", 1),
        ("another module", "this machine has no helm", 1),
    ],
)
def test_an_unlisted_skip_fails_a_run(tmp_path: Path, processes: int, whole: str, one: str, code: int) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n", encoding="utf-8")
    (tmp_path / "test_whole.py").write_text(SKIPPING.format(whole=whole), encoding="utf-8")
    (tmp_path / "test_one.py").write_text(SKIPS_ONE.format(one=one), encoding="utf-8")
    flags = f"-q -p no:cacheprovider -p xdist -n {processes} --rootdir ."
    command = [sys.executable, "-m", "pytest", *flags.split()]
    environment = {**os.environ, "CACHESVC_SKIPS": "listed", "CACHESVC_GOAL": "test", "PYTHONPATH": str(ROOT)}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the other plugins take most of the time of three processes
    environment.pop("PYTEST_ADDOPTS", None)
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stdout
    unexpected = [line for line in ended.stdout.splitlines() if line.endswith((": not today", ": another module"))]
    assert len(unexpected) == code
