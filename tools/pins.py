"""Fails where this interpreter has a package in a version that the lock does not name. Runs while an image is built.

python pins.py requirements/lock.txt
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

OWN = "cachesvc"


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def unlocked(installed: Iterable[tuple[str, str]], lock: str) -> list[str]:
    """``name==version`` of each of ``installed`` that no line of ``lock`` pins so."""
    pins = re.findall(r"^([\w.-]+)==([^\s;]+)", lock, re.MULTILINE)
    allowed = {(canonical(name), version) for name, version in pins}
    found = {(canonical(name), version) for name, version in installed}
    return sorted(f"{name}=={version}" for name, version in found - allowed if name != OWN)


def main() -> None:
    """Look at the packages of the interpreter that runs this."""
    lock = Path(sys.argv[1]).read_text(encoding="utf-8")
    strangers = unlocked(((each.name, each.version) for each in metadata.distributions()), lock)
    if strangers:
        sys.exit(f"not in {sys.argv[1]}: {', '.join(strangers)}; add their extra to `make lock` and run it")


if __name__ == "__main__":
    main()
