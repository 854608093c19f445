"""The files of the project: what git holds or would hold, so that build outputs are not judged."""

from __future__ import annotations

import ast
import fnmatch
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = "proto/gen/"


def list_files(root: Path = ROOT) -> list[str]:
    """Paths below ``root``, as git names them; where git cannot say, all that .gitignore does not name."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return walk(root)
    listing = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if listing.returncode:  # a clone that belongs to another user, for one
        return walk(root)
    return sorted({name for name in listing.stdout.split("\0") if name and (root / name).is_file()})


def walk(root: Path) -> list[str]:
    """Every file below ``root`` of whose path no part matches a line of the root's .gitignore."""
    masks = [line.rstrip("/") for line in (root / ".gitignore").read_text().split()] + [".git"]
    found = []
    for directory, below, names in os.walk(root):
        below[:] = _without(below, masks)
        found += [str((Path(directory) / name).relative_to(root)) for name in _without(names, masks)]
    return sorted(found)


def read_texts(*suffixes: str) -> Iterator[tuple[str, str]]:
    """Name and text of every file that a person wrote, or of those alone that end in one of ``suffixes``."""
    for name in list_files():
        if name.startswith(GENERATED) or (suffixes and Path(name).suffix not in suffixes):
            continue
        content = (ROOT / name).read_bytes()
        if b"\0" not in content:
            yield name, content.decode()


def list_functions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods, also nested ones. Expressions hold none and are not walked."""
    nodes: list[ast.AST] = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        nodes += [each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr)]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _without(names: list[str], masks: list[str]) -> list[str]:
    return [name for name in names if not any(fnmatch.fnmatch(name, mask) for mask in masks)]
