"""The shape of the code, one column a revision: ``python -m tools.shape [REV ...]``; ``.`` is the working tree.

Sizes, folders, Protocols with one implementation, and the habits that are to become rarer: pins and pages moved by hand
in flows, the ledger read in the service, ``Any`` in signatures. A line of code is one that is neither blank, nor a
comment, nor part of a docstring. The core is the product without what researchers and engines' kernels have apart.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tarfile
import tokenize
from collections import Counter
from collections.abc import Container, Iterator
from pathlib import Path, PurePath

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cachesvc", "client", "gpu_ops", "tests", "benchmarks", "examples", "tools")
PRODUCT = ("cachesvc", "client", "gpu_ops")
APART = ("client/cachesvc_ctl/lab", "client/cachesvc_lab", "gpu_ops/kernels")
"""Folders of the product that its core does not count: the laboratory, and kernels for engines."""
MOST_MODULES = 25
"""Modules of a folder, beside ``__init__``: what a reader keeps in mind."""
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
    core = {path: text for path, text in product.items() if not str(path).startswith(APART)}
    out |= {f"core: {name}": count for name, count in core_of(core).items()}
    every = {path: text for path, text in files.items() if path.parts[0] in {*PRODUCT, "tools", "benchmarks"}}
    out["product, tools and benchmarks: lines of code"] = sum(map(code_lines, every.values()))
    out["tests: test functions"] = sum(
        text.count("\ndef test_") + text.count("\nasync def test_")
        for path, text in files.items()
        if path.parts[0] == "tests"
    )
    sizes = modules_by_folder(product)
    out["modules in the largest folder of the product"] = max(sizes.values())
    out[f"folders of the product above {MOST_MODULES} modules"] = sum(size > MOST_MODULES for size in sizes.values())
    out["circles between folders of the product"] = len(circles_of(product))
    out["class names twice in a distribution"] = len(twice_named(product))
    out["longest file of the product, lines"] = max(text.count("\n") for text in product.values())
    trees = [ast.parse(text) for text in product.values()]
    lengths = sorted(length for tree in trees for length in lengths_of(tree))
    for name, at in (("p50", 0.5), ("p95", 0.95), ("max", 1.0)):
        out[f"functions of the product, lines: {name}"] = lengths[min(len(lengths) - 1, int(at * len(lengths)))]
    anys = [is_any for tree in trees for is_any in annotations_of(tree)]
    out["Any in signatures of the product"] = sum(anys)
    out["Any in signatures, a thousand annotations"] = 1000 * sum(anys) // len(anys)
    flows = [text for path, text in files.items() if path.parts[:2] == ("cachesvc", "flows")]
    out["pins and pages moved by hand in flows"] = sum(len(BY_HAND.findall(text)) for text in flows)
    service = [text for path, text in files.items() if path.parts[:2] == ("cachesvc", "service")]
    out["reads of .ledger in the service"] = sum(len(re.findall(r"\.ledger\b", text)) for text in service)
    return out


def core_of(files: Files) -> dict[str, int]:
    """Sizes of the core by name."""
    trees = [ast.parse(text) for text in files.values()]
    kinds = [type(node) for tree in trees for node in ast.walk(tree)]
    return {
        "lines": sum(text.count("\n") for text in files.values()),
        "lines of code": sum(map(code_lines, files.values())),
        "files": len(files),
        "classes": kinds.count(ast.ClassDef),
        "functions": kinds.count(ast.FunctionDef) + kinds.count(ast.AsyncFunctionDef),
        "Protocols and ABCs with one implementation": len(lone_protocols(trees)),
        "comments on lines of their own": sum(len(re.findall(r"^\s*#", text, re.MULTILINE)) for text in files.values()),
    }


def code_lines(text: str) -> int:
    """Lines that are neither blank, nor a comment, nor part of a docstring."""
    lines: set[int] = set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        for each in getattr(node, "body", ()) if isinstance(getattr(node, "body", None), list) else ():
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                lines -= set(range(each.lineno, (each.end_lineno or each.lineno) + 1))
    return len(lines)


def lone_protocols(trees: list[ast.Module]) -> list[str]:
    """Names of Protocols and abstract classes that exactly one other class fills: by inheritance, or by having all of
    their public methods, its bases' and its attributes included."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = {node.name: {ast.unparse(base).partition("[")[0] for base in node.bases} for node in classes}
    names: dict[str, set[str]] = {name: set() for name in bases}
    for node in classes:
        names[node.name] |= set(names_of(node))
    for node in classes:  # classes come behind their bases
        names[node.name] |= set().union(*(names.get(base, set()) for base in bases[node.name]))
    abstract = {name for name, above in bases.items() if above & {"Protocol", "ABC"}}
    found = []
    for name in sorted(abstract):
        asked = {each for each in names[name] if not each.startswith("_")}
        fills = [
            other for other in bases.keys() - abstract if name in bases[other] or (asked and asked <= names[other])
        ]
        if len(fills) == 1:
            found.append(name)
    return found


def names_of(node: ast.ClassDef) -> Iterator[str]:
    """Methods, fields and attributes of a class."""
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield each.name
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self":
            yield each.attr


def modules_by_folder(files: Files) -> Counter[PurePath]:
    """Number of modules in each folder, without ``__init__``."""
    return Counter(path.parent for path in files if path.name != "__init__.py")


def circles_of(files: Files) -> list[list[str]]:
    """Sets of folders that import each other, directly or by way of others. An ``__init__`` does not count: it
    shows what lies below it."""
    modules = {module_of(path): path for path in files if path.name != "__init__.py"}
    above: dict[str, set[str]] = {str(path.parent): set() for path in modules.values()}
    for path in modules.values():
        for found in imports_of(ast.parse(files[path]), modules):
            above[str(path.parent)].add(str(modules[found].parent))
    return [sorted(circle) for circle in circles_in(above) if len(circle) > 1]


def circles_in(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Nodes that reach each other, by what each reaches. Small graphs alone."""
    reached = {node: set(to) for node, to in arrows.items()}
    for middle, beyond in reached.items():
        for to in reached.values():
            if middle in to and to is not beyond:
                to.update(beyond)
    circles: list[set[str]] = []
    for node, to in reached.items():
        if not any(node in circle for circle in circles):
            circles.append({node} | {other for other in to if node in reached.get(other, ())})
    return circles


def twice_named(files: Files) -> dict[tuple[str, str], list[PurePath]]:
    """Paths by distribution and name, of public classes whose name occurs in more than one module."""
    found: dict[tuple[str, str], list[PurePath]] = {}
    for path, text in sorted(files.items()):
        package = module_of(path).partition(".")[0]
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault((package, node.name), []).append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def module_of(path: PurePath) -> str:
    """Dotted name by which a file is imported."""
    parts = path.with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "client" else parts)


def imports_of(tree: ast.AST, modules: Container[str]) -> Iterator[str]:
    """Those of ``modules`` that a file imports."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        yield from (name for name in names if name in modules)


def lengths_of(tree: ast.AST) -> Iterator[int]:
    """Lines of each function, from its ``def`` to its end."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def annotations_of(tree: ast.AST) -> Iterator[bool]:
    """For each annotated parameter and result, whether it is ``Any`` or something of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            annotations = [each.annotation for each in every if each is not None] + [node.returns]
            yield from (_has_any(each) for each in annotations if each is not None)


def _has_any(annotation: ast.AST) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(annotation))


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


if __name__ == "__main__":
    main()
