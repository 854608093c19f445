"""The distribution's page in a package index, and that the lock pins what it needs and nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from itertools import chain

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as canonical

from tests.style.tree import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
UNSEEN = {"cuda-pathfinder", "pycparser"}
"""Packages that the tests' environment lacks, and to which only packages lead: CuPy, and cffi, which PyPy alone wants.
Mooncake, whose file is made for it alone, is one as well."""


def test_an_index_shows_what_it_is_and_by_whom() -> None:
    command = [sys.executable, "-m", "hatchling", "metadata"]
    shown = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert shown["readme"]["content-type"] == "text/markdown"
    assert shown["readme"]["text"].startswith("# cachesvc\n")
    assert shown["authors"] == [{"name": "The cachesvc authors"}]
    assert {"kv-cache", "llm", "inference"} <= set(shown["keywords"])
    assert "urls" not in shown, "an address that is not there is worse than none"


def test_the_lock_has_nothing_that_no_requirement_leads_to() -> None:
    unseen = UNSEEN | pinned("mooncake")
    assert pinned("lock") - reachable() - unseen == set(), "run make lock without --upgrade, or take the lines out"


def pinned(name: str) -> set[str]:
    """The packages of a file."""
    lock = (ROOT / f"requirements/{name}.txt").read_text(encoding="utf-8")
    return {canonical(each) for each in re.findall(r"^([\w.-]+)==", lock, re.MULTILINE)}


def reachable() -> set[str]:
    """Every distribution that one of our requirements leads to, on any platform."""
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"], *chain(*extras.values())]
    found: set[str] = set()
    left = [Requirement(each) for each in wanted]
    while left:
        each = left.pop()
        name = canonical(each.name)
        key = f"{name}[{','.join(sorted(each.extras))}]"
        if key not in found:
            found |= {key, name}
            left += needs(each)
    return found


def needs(requirement: Requirement) -> Iterator[Requirement]:
    """Requirements of an installed distribution, with the extras that are asked for; none for other distributions."""
    try:
        lines = metadata.requires(requirement.name) or ()
    except metadata.PackageNotFoundError:
        return
    for line in lines:
        each = Requirement(line)
        of_extra = re.search(r"extra == ['\"]([\w-]+)['\"]", str(each.marker or ""))
        if of_extra is None or of_extra[1] in requirement.extras:
            yield each
