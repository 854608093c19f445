"""The product's folders are small, none imports another in a circle, and a class name means one thing."""

from __future__ import annotations

from pathlib import PurePath

import pytest

from tools.shape import (
    MOST_MODULES,
    PRODUCT,
    circles_of,
    files_of,
    modules_by_folder,
    twice_named,
)

IN_DAEMON = (
    *("Call", "Event", "Heads", "Keep", "Line"),
    *("Mover", "Registered", "Scope", "Tier", "Vault"),
)
TWICE = {("cachesvc", name) for name in IN_DAEMON}
"""Class names that still occur twice in a distribution. A name leaves this list with its second use; none is added."""


@pytest.fixture(scope="module")
def product() -> dict[PurePath, str]:
    return {path: text for path, text in files_of(".").items() if path.parts[0] in PRODUCT}


def test_folders_are_small(product: dict[PurePath, str]) -> None:
    large = {str(folder): size for folder, size in modules_by_folder(product).items() if size > MOST_MODULES}
    assert not large, f"more than {MOST_MODULES} modules; which subject can leave? {large}"


def test_no_folders_import_each_other(product: dict[PurePath, str]) -> None:
    assert circles_of(product) == [], "move what both need to a folder below them"


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
