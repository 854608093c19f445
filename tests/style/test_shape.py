"""The product's folders are small, none imports another in a circle, and a class name means one thing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import PurePath

import pytest

from tests.style.tree import ROOT
from tools.shape import (
    APART,
    MOST_MODULES,
    PRODUCT,
    circles_of,
    files_of,
    imports_of,
    lone_protocols,
    module_of,
    modules_by_folder,
    twice_named,
)

IN_DAEMON = (
    *("Call", "Event", "Heads", "Keep", "Line"),
    *("Mover", "Registered", "Scope", "Tier"),
)
TWICE = {("cachesvc", name) for name in IN_DAEMON}
"""Class names that still occur twice in a distribution. A name leaves this list with its second use; none is added."""

LONE = {
    *("Chooser", "CopyStream", "EvictionPolicy", "GpuDevice", "GpuMemory", "GpuQueue"),
    *("HostPages", "Lenders", "ModelFacts", "Path", "PeerControl", "PositionRule"),
    *("Reserved", "Shadow", "SliceRunner", "Timeline", "Traveller"),
}
"""Protocols and abstract classes that still have one implementation. None is added."""

SMALL_LINES = 120
SMALL = {
    *("client/cachesvc_ctl/core/daemon_process.py", "client/cachesvc_ctl/describe.py"),
    *("client/cachesvc_ctl/main.py", "client/cachesvc_ctl/top.py"),
}
"""Modules of fewer lines with one importer, which is of another layer, or imports them where an extra is there."""

SHORT_WORDS = 6


@pytest.fixture(scope="module")
def product() -> dict[PurePath, str]:
    return {path: text for path, text in files_of(".").items() if path.parts[0] in PRODUCT}


@pytest.fixture(scope="module")
def core(product: dict[PurePath, str]) -> dict[PurePath, ast.Module]:
    return {path: ast.parse(text) for path, text in product.items() if not str(path).startswith(APART)}


def len_of(path: PurePath) -> int:
    return (ROOT / path).read_text(encoding="utf-8").count("\n")


def named_again(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Functions and classes with a body whose docstring has so few words; what it raises may take fewer."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and len(node.body) > 1:
            said = ast.get_docstring(node) or ""
            is_seam = isinstance(node, ast.ClassDef) and "Protocol" in ast.unparse(node).partition(":")[0]
            if 0 < len(said.split()) <= SHORT_WORDS and "raises" not in said.lower() and not is_seam:
                yield node


def test_folders_are_small(product: dict[PurePath, str]) -> None:
    large = {str(folder): size for folder, size in modules_by_folder(product).items() if size > MOST_MODULES}
    assert not large, f"more than {MOST_MODULES} modules; which subject can leave? {large}"


def test_no_folders_import_each_other(product: dict[PurePath, str]) -> None:
    assert circles_of(product) == [], "move what both need to a folder below them"


def test_a_small_module_has_more_than_one_importer(core: dict[PurePath, ast.Module]) -> None:
    modules = {module_of(path): path for path in core}
    importers: dict[PurePath, set[PurePath]] = {path: set() for path in core if not path.name.startswith("__")}
    for path, tree in core.items():
        for module in () if path.name == "__init__.py" else imports_of(tree, modules):
            importers.get(modules[module], set()).add(path)
    small = {str(path) for path, by in importers.items() if len(by) == 1 and len_of(path) < SMALL_LINES}
    assert small == SMALL, "a module of one importer belongs to it"


def test_protocols_have_two_implementations(core: dict[PurePath, ast.Module]) -> None:
    assert set(lone_protocols(list(core.values()))) == LONE, "use the class itself"


def test_docstrings_say_more_than_the_name(core: dict[PurePath, ast.Module]) -> None:
    short = [f"{path}:{node.lineno} {node.name}" for path, tree in core.items() for node in named_again(tree)]
    assert not short, "effect, result, units, errors or source; or none\n" + "\n".join(short)


def test_a_class_name_means_one_thing_in_a_distribution(product: dict[PurePath, str]) -> None:
    found = twice_named(product)
    new = {
        f"{package}.{name}": [str(path) for path in paths]
        for (package, name), paths in found.items()
        if (package, name) not in TWICE
    }
    assert not new, "name the second one by what it is beside the first"
    assert found.keys() >= TWICE, "these are named apart by now: take them off the list"


def test_the_ledger_knows_no_policy_by_its_name(product: dict[PurePath, str]) -> None:
    """It asks an ``EvictionPolicy``; which one that is, and what it learns, stays in ``cachesvc/policy``."""
    ledger = {path: text for path, text in product.items() if path.parts[:2] == ("cachesvc", "ledger")}
    assert ledger
    assert [str(path) for path, text in ledger.items() if "hazard" in text.lower() or "cachesvc.policy" in text] == []


def test_a_circle_is_found_through_a_third_folder() -> None:
    files = {
        PurePath("cachesvc/a/x.py"): "from cachesvc.b import y",
        PurePath("cachesvc/b/y.py"): "def f():\n    from cachesvc.c.z import g",
        PurePath("cachesvc/c/z.py"): "import cachesvc.a.x2",
        PurePath("cachesvc/a/x2.py"): "",
        PurePath("cachesvc/d/w.py"): "from cachesvc.a.x import h",
    }
    assert circles_of(files) == [["cachesvc/a", "cachesvc/b", "cachesvc/c"]]
    del files[PurePath("cachesvc/b/y.py")]
    assert circles_of(files) == []


def test_what_a_package_shows_is_no_circle() -> None:
    files = {
        PurePath("client/cachesvc_client/__init__.py"): "from cachesvc_client.a.x import X",
        PurePath("client/cachesvc_client/a/x.py"): "from cachesvc_client.top import Y\nclass X: ...",
        PurePath("client/cachesvc_client/top.py"): "class Y: ...",
    }
    assert circles_of(files) == []
    assert twice_named(files) == {}
    files[PurePath("client/cachesvc_client/a/z.py")] = "class X: ...\nclass _Y: ..."
    assert list(twice_named(files)) == [("cachesvc_client", "X")]
    assert modules_by_folder(files) == {PurePath("client/cachesvc_client"): 1, PurePath("client/cachesvc_client/a"): 2}
