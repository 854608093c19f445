"""Names under which engines share, by the installed vLLM's own configurations and hub cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.rig import MODEL, PYTHON_VARIABLE, ROOT, engine_environment
from tests.vllm.weights import write_checkpoint

HUB = """
import sys
from types import SimpleNamespace
from cachesvc_client.plugins.keeper import ConnectorRefused
from cachesvc_vllm.media import _checkpoint
folder, commit = (each or None for each in sys.argv[1:])
model = SimpleNamespace(model="org/m", revision="main", hf_config=SimpleNamespace(_commit_hash=commit))
try:
    print(_checkpoint(model, SimpleNamespace(download_dir=folder)))
except ConnectorRefused as error:
    print(error)
"""
COMMITS = ("ab" * 20, "cd" * 20)


def names(folders: list[Path], **variables: str) -> dict[str, Any]:
    """Names that a process of the installed vLLM makes."""
    command = [os.environ[PYTHON_VARIABLE], "-m", "tests.vllm.identities", *map(str, folders)]
    environment = {**engine_environment(), "XDG_CACHE_HOME": str(folders[0].parent / "cache"), **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One checkpoint, under two names."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    folder.mkdir()
    write_checkpoint(folder, MODEL, seed=1)
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    return [folder, shutil.copytree(folder, folder.parent / "another")]


@pytest.fixture(scope="module")
def told(folders: list[Path]) -> dict[str, Any]:
    """Names of engines that differ in one option each."""
    return names(folders)


def test_options_that_decide_no_byte_do_not_keep_engines_apart(told: dict[str, Any]) -> None:
    assert {each for each, name in told["same"].items() if name != told["first"]} == set()


def test_each_option_that_decides_bytes_keeps_engines_apart(told: dict[str, Any]) -> None:
    apart = [told["first"], *told["other"].values()]
    assert len(set(apart)) == len(apart), told["other"]


def test_an_option_of_the_next_release_keeps_engines_apart(told: dict[str, Any]) -> None:
    off, on = told["future"]
    assert off != on


def test_another_process_has_the_same_names_and_a_variable_of_kernels_others(
    folders: list[Path], told: dict[str, Any]
) -> None:
    assert names(folders, PYTHONHASHSEED="17", VLLM_PORT="4711", VLLM_NIXL_SIDE_CHANNEL_PORT="4712") == told
    assert names(folders, VLLM_BATCH_INVARIANT="1")["first"] != told["first"]


def hub_cache(cache: Path, commit: str, content: bytes) -> Path:
    """A cache of the Hugging Face hub whose branch main is at a commit."""
    model = cache / "models--org--m"
    (model / "refs").mkdir(parents=True, exist_ok=True)
    (model / "refs" / "main").write_text(commit, encoding="utf-8")
    (model / "snapshots" / commit).mkdir(parents=True)
    (model / "snapshots" / commit / "model.safetensors").write_bytes(content)
    return cache


def hub_digest(cache: Path, folder: str = "", commit: str = "", **variables: str) -> str:
    """Digest in a process that has this cache."""
    environment = {**engine_environment(), "HF_HUB_CACHE": str(cache), "XDG_CACHE_HOME": str(cache / "none")}
    command = [os.environ[PYTHON_VARIABLE], "-c", HUB, folder, commit]
    done = subprocess.run(command, env={**environment, **variables}, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def test_a_branch_is_its_snapshot_in_the_cache_that_vllm_reads(tmp_path: Path) -> None:
    usual = hub_cache(tmp_path / "usual", COMMITS[0], b"old")
    other = hub_cache(tmp_path / "other", COMMITS[1], b"new")
    assert hub_digest(usual) == hub_digest(usual, commit=COMMITS[0]) != hub_digest(other)
    assert hub_digest(usual, folder=str(other)) == hub_digest(other)
    assert "moved from commit" in hub_digest(usual, commit=COMMITS[1])
    assert "may move" in hub_digest(usual, VLLM_USE_MODELSCOPE="True")
    hub_cache(usual, COMMITS[1], b"new")
    assert hub_digest(usual) == hub_digest(other)
