"""The check for stale stubs sees every way to be stale; that ours are fresh is for `make proto-check`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.genproto import list_differences, replace_tree


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    """Fresh and committed stubs that agree in one file, and differ in three ways in the others."""
    fresh, committed = tmp_path / "fresh", tmp_path / "committed"
    for path, text in (
        (fresh / "v1/same_pb2.py", "a\n"),
        (committed / "v1/same_pb2.py", "a\n"),
        (fresh / "v1/changed_pb2.py", "new\n"),
        (committed / "v1/changed_pb2.py", "old\n"),
        (fresh / "v1/added_pb2.py", "b\n"),
        (committed / "v1/gone_pb2.py", "c\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return fresh, committed


def test_every_difference_is_named(trees: tuple[Path, Path]) -> None:
    text = "".join(list_differences(*trees))
    assert "missing: v1/added_pb2.py" in text
    assert "no proto makes it: v1/gone_pb2.py" in text
    assert "-old\n+new\n" in text
    assert "same_pb2" not in text


def test_replacing_writes_what_differs_and_leaves_nothing_to_say(trees: tuple[Path, Path]) -> None:
    _, committed = trees
    changed = [str(path.relative_to(committed)) for path in replace_tree(*trees)]
    assert changed == ["v1/added_pb2.py", "v1/changed_pb2.py", "v1/gone_pb2.py"]
    assert list(list_differences(*trees)) == []
    assert not (committed / "v1/gone_pb2.py").exists()
    assert list(replace_tree(*trees)) == []


def test_what_python_leaves_beside_the_stubs_is_no_difference(trees: tuple[Path, Path]) -> None:
    list(replace_tree(*trees))
    (trees[1] / "__pycache__").mkdir()
    (trees[1] / "__pycache__/same_pb2.pyc").touch()
    assert list(list_differences(*trees)) == []
