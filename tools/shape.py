"""The shape of the code, one column a revision: ``python -m tools.shape [REV ...]``; ``.`` is the working tree.

Sizes, folders, and the habits that are to become rarer: pins and pages moved by hand in flows, the ledger read in the
service, ``Any`` in signatures.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePath

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cachesvc", "client", "gpu_ops", "tests", "benchmarks", "examples", "tools")
PRODUCT = ("cachesvc", "client", "gpu_ops")
BY_HAND = re.compile(r"\.(?:pin|unpin|pin_window|unpin_window|move|move_all|take)\(")
Files = dict[PurePath, str]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.shape", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("revisions", nargs="*", default=["."], metavar="REV")
    revisions = parser.parse_args().revisions
    shapes = [shape_of(files_of(revision)) for revision in revisions]
    print(f"{'':44}" + "".join(f"{revision:>14.12}" for revision in revisions))
    for name in shapes[-1]:
        print(f"{name:44}" + "".join(f"{shape.get(name, 0):>14,}" for shape in shapes))


def files_of(revision: str) -> Files:
    """Python files by path, in a revision or (``.``) as they are now."""
    if revision == ".":
        listed = _git("ls-files", "--cached", "--others", "--exclude-standard", "*.py").decode().split("\n")
        return {PurePath(name): (ROOT / name).read_text(encoding="utf-8") for name in listed if (ROOT / name).is_file()}
    out: Files = {}
    with tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", revision))) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() and member.name.endswith(".py") else None
            if content is not None:
                out[PurePath(member.name)] = content.read().decode()
    return out


def shape_of(files: Files) -> dict[str, int]:
    """Counts by name."""
    out: dict[str, int] = {}
    for folder in FOLDERS:
        mine = [text for path, text in files.items() if path.parts[0] == folder]
        out[f"{folder}: lines"] = sum(text.count("\n") for text in mine)
        out[f"{folder}: files"] = len(mine)
    product = {path: text for path, text in files.items() if path.parts[0] in PRODUCT}
    out["files in the largest folder of the product"] = max(Counter(path.parent for path in product).values())
    out["longest file of the product, lines"] = max(text.count("\n") for text in product.values())
    trees = [ast.parse(text) for text in product.values()]
    lengths = sorted(length for tree in trees for length in lengths_of(tree))
    for name, at in (("p50", 0.5), ("p95", 0.95), ("max", 1.0)):
        out[f"functions of the product, lines: {name}"] = lengths[min(len(lengths) - 1, int(at * len(lengths)))]
    out["Any in signatures of the product"] = sum(anys_in(tree) for tree in trees)
    flows = [text for path, text in files.items() if path.parts[:2] == ("cachesvc", "flows")]
    out["pins and pages moved by hand in flows"] = sum(len(BY_HAND.findall(text)) for text in flows)
    service = [text for path, text in files.items() if path.parts[:2] == ("cachesvc", "service")]
    out["reads of .ledger in the service"] = sum(len(re.findall(r"\.ledger\b", text)) for text in service)
    return out


def lengths_of(tree: ast.AST) -> Iterator[int]:
    """Lines of each function, from its ``def`` to its end."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def anys_in(tree: ast.AST) -> int:
    """Number of parameters and results that are annotated with ``Any``, or with something of it."""
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            annotations = [each.annotation for each in every if each is not None] + [node.returns]
            found += sum(_has_any(each) for each in annotations if each is not None)
    return found


def _has_any(annotation: ast.AST) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(annotation))


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


if __name__ == "__main__":
    main()
