"""Everything that is installed is pinned to one version, and to the hashes of its files."""

from __future__ import annotations

import json
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as canonical

from tests.style.tree import ROOT

FOLDER = ROOT / "requirements"
MAKEFILE = re.sub(r"\\\n\s*", " ", (ROOT / "Makefile").read_text(encoding="utf-8"))
HASHED = ("setup", "image", "image-cuda13", "mooncake", "routers", "build", "uv", "node")


def pins(name: str) -> dict[str, str]:
    """Versions that a file pins, by name."""
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    return {canonical(found[1]): found[2] for found in re.finditer(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)}


def extras_of(name: str) -> set[str]:
    """The extras that ``make lock`` compiles a file from."""
    (command,) = re.findall(
        rf"^.*--output-file (?:\$\(LOCK\)|requirements/{name}\.txt) pyproject.*$", MAKEFILE, re.MULTILINE
    )[-1:]
    for variable in re.findall(r"\$\((\w+_EXTRAS)\)", command):
        (value,) = re.findall(rf"^{variable} := (.*)$", MAKEFILE, re.MULTILINE)
        command += f" {value}"
    return set(re.findall(r"--extra (\w+)", command))


@pytest.mark.parametrize("name", HASHED)
def test_every_package_has_hashes_and_the_version_of_the_lock(name: str) -> None:
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    packages = re.split(r"^(?=\S)", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", each) for each in packages if each.strip())
    assert "://" not in text, "where a package comes from is the machine's own affair"
    lock = pins("lock")
    assert {
        package: version for package, version in pins(name).items() if package in lock and lock[package] != version
    } == {}
    if name not in ("uv", "node", "routers"):
        assert pins(name).keys() <= lock.keys(), "run make lock UPGRADE="


@pytest.mark.parametrize("name", ["setup", "image", "image-cuda13"])
def test_a_file_has_all_that_its_extras_ask_for(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for extra in extras_of(name) for line in extras[extra])]
    names = {canonical(Requirement(line).name) for line in wanted} - {"cachesvc"}
    assert names <= pins(name).keys(), "run make lock UPGRADE="


def test_the_image_can_serve_metrics_and_place_memory() -> None:
    assert {"prometheus-client", "py-libnuma", "uvloop", "xxhash"} <= pins("image").keys()
    assert "cupy-cuda13x" in pins("image-cuda13")
    assert pins("image").items() <= pins("image-cuda13").items()


def test_make_installs_nothing_without_hashes() -> None:
    commands = [
        each
        for each in re.findall(r"pip install[^\n]*", MAKEFILE)
        if not re.search("(VLLM|SGLANG|FRAMEWORKS)_LOCK", each)
    ]
    assert len(commands) == 2, "beside those of tests' own environments, whose torch is another on each machine"
    assert all("--no-deps" in command for command in commands)
    assert [command for command in commands if "--require-hashes" not in command] == [
        "pip install --quiet --no-deps --no-build-isolation --editable ."
    ]
    npm = re.findall(r"npm install ([^&|\n]*)", MAKEFILE)
    assert [command.split()[0] for command in npm] == ["--package-lock-only", "--no-save"], "beside its lock"


@pytest.mark.parametrize("name", ["buf", "monitors"])
def test_what_npm_installs_has_hashes_too(name: str) -> None:
    folder = FOLDER / "npm" / name
    asked = json.loads((folder / "package.json").read_text(encoding="utf-8"))["dependencies"]
    locked = json.loads((folder / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert locked.pop("")["dependencies"] == asked
    assert locked
    for package in locked.values():
        assert package["integrity"].startswith("sha512-")
        assert "resolved" not in package
