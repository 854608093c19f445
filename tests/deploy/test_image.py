"""The Dockerfile: linted, pinned, and about things that are there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from cachesvc_ctl.actions import Wait
from cachesvc_ctl.main import parse

from tests.deploy.manifests import daemon_pod, load
from tests.style.tree import ROOT, list_files

DOCKERFILE = ROOT / "deploy/docker/Dockerfile"


class Step(NamedTuple):
    """One instruction and its words; ``stage`` counts from 0, before the first FROM it is -1."""

    stage: int
    name: str
    text: str


def steps() -> list[Step]:
    """The instructions, continued lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found: list[Step] = []
    stage = -1
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            stage += name == "FROM"
            found.append(Step(stage, name, rest))
    return found


def of(name: str) -> list[Step]:
    """Instructions of one kind."""
    return [step for step in steps() if step.name == name]


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    worse = DOCKERFILE.read_text(encoding="utf-8").replace("libnuma1=2.0.16-1", "libnuma1")
    done = subprocess.run([hadolint, "-"], input=worse, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "DL3008" in done.stdout


def test_bases_are_pinned_by_version_and_digest() -> None:
    (base,) = [step.text for step in of("ARG") if step.stage < 0]
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base)
    assert [step.text.split()[0] for step in of("FROM")] == ["${PYTHON_IMAGE}"] * 2


def test_what_is_copied_is_there_and_in_the_context() -> None:
    files = list_files()
    copied = [words[:-1] for step in of("COPY") if not (words := shlex.split(step.text))[0].startswith("--from")]
    assert len(copied) >= 6
    sources = {source for words in copied for source in words}
    for source in sources:
        assert [name for name in files if name == source or name.startswith(f"{source}/")], source
        assert is_in_context(source), source
    assert not is_in_context("tests")
    assert not is_in_context(".git")


def is_in_context(source: str) -> bool:
    """True where .dockerignore leaves a path in: the last pattern that matches it or a folder above it decides."""
    kept = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.removeprefix("!")
        above = [source, *(str(parent) for parent in Path(source).parents)]
        if line and not line.startswith("#") and any(fnmatch(path, pattern) for path in above if path != "."):
            kept = line.startswith("!")
    return kept


def test_the_wheel_gets_every_package_that_it_is_made_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    copied = " ".join(step.text for step in of("COPY"))
    for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        assert package.removesuffix("/kvcache") in copied.split()
    for name in project["project"]["license-files"]:
        assert name in copied.split()


def test_packages_are_installed_by_hash_and_nothing_else_comes_along() -> None:
    commands = [
        each.strip() for step in of("RUN") for each in step.text.split("&&") if "pip" in each and "install" in each
    ]
    own = [each for each in commands if "/wheels/" in each]
    assert len(own) == 1
    assert len(commands) == 3
    for command in commands:
        assert "--no-deps" in command
        assert "--require-hashes" in command or command in own
    (default,) = [step.text.removeprefix("PACKAGES=") for step in of("ARG") if step.text.startswith("PACKAGES=")]
    told = re.findall(r"--build-arg PACKAGES=([\w-]+)", DOCKERFILE.read_text(encoding="utf-8"))
    copied = {word for step in of("COPY") for word in step.text.split()}
    assert told
    assert {f"requirements/{name}.txt" for name in ("build", default, *told)} <= copied


def test_the_user_is_the_manifests_user_and_the_programs_are_those_that_they_start() -> None:
    pod = daemon_pod(load("trial"))
    assert pod is not None
    context = pod.spec["securityContext"]
    assert [step.text for step in of("USER")] == [f"{context['runAsUser']}:{context['runAsGroup']}"]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert [step.text for step in of("ENTRYPOINT")] == ['["cachesvcd"]']
    assert {"cachesvcd", "cachesvc"} <= set(scripts)


def test_the_health_check_is_a_command_that_ends_in_time() -> None:
    text = of("HEALTHCHECK")[0].text
    program, *words = json.loads(text.partition("CMD ")[2])
    assert program == "cachesvc"
    arguments = parse(words)
    assert arguments.command is Wait
    (limit,) = re.findall(r"--timeout=(\d+)s", text)
    assert arguments.timeout < int(limit)
