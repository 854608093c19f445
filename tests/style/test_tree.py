"""The rules judge what people wrote, and a wheel carries all of it that users need."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.style.tree import ROOT, list_files, walk

# Where a package lies in the tree, and where in a wheel.
PACKAGES = {
    "cachesvc/": "cachesvc/",
    "client/cachesvc_client/": "cachesvc_client/",
    "client/cachesvc_ctl/": "cachesvc_ctl/",
    "client/cachesvc_lab/": "cachesvc_lab/",
    "client/cachesvc_sglang/": "cachesvc_sglang/",
    "client/cachesvc_vllm/": "cachesvc_vllm/",
    "gpu_ops/": "gpu_ops/",
}
STUBS = {"proto/gen/kvcache/": "kvcache/"}
CI = (ROOT / ".ci" / "run").read_text().replace("\\\n", " ")
RECIPE = re.compile(r"^([a-z-]+):.*\n((?:\t.*\n)+)", re.MULTILINE)
VARIABLE = re.compile(r"\b(CACHESVC_\w+)=")


def test_without_git_the_files_are_those_not_ignored(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("out/\n*.egg-info/\n")
    for name in ("a/b.py", "a/out/c.py", "x.egg-info/d", ".git/config"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert list_files(tmp_path) == walk(tmp_path) == [".gitignore", "a/b.py"]


def test_the_wheel_holds_the_packages_and_nothing_else(tmp_path: Path) -> None:
    files = list_files()
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=ROOT, check=True
    )
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    wanted = {
        inside + name.removeprefix(outside)
        for name in files
        for outside, inside in (PACKAGES | STUBS).items()
        if name.startswith(outside)
    }
    assert packed == wanted
    assert {f"{inside}py.typed" for inside in PACKAGES.values()} <= packed


def test_what_failed_in_ci_runs_again_under_the_same_variables() -> None:
    """Without them a test skips itself, and its failure would count as mended."""
    recipes = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    goals = {goal: set(VARIABLE.findall(recipe)) for goal, recipe in RECIPE.findall(recipes)}
    again = {
        folder: set(VARIABLE.findall(before))
        for before, folder in re.findall(r"((?:\S+=\S+ +)*)\S+ -m pytest tests/(\w+).* --last-failed", CI)
    }
    assert again == {"unit": goals["examples-test"], "vllm": goals["vllm-test"], "sglang": goals["sglang-test"]}
    assert goals["examples-test"] == {"CACHESVC_LONG"}
    assert goals["vllm-test"] == {"CACHESVC_ROUTERS", "CACHESVC_VLLM_PYTHON"}
