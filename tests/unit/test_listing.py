"""Which GPUs there are, as a process of its own says: what it says is taken, and what it breaks with is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cachesvc.model.errors import Unavailable
from cachesvc.mover.listing import Listing


def lister(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have this run in the place of Python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="ascii")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_the_real_one_says_what_this_machine_has() -> None:
    told = Listing().gpus()
    assert len(told) == 1
    assert set(told) < {"gpus", "absent", "broken"}


def test_it_is_asked_for_the_list_and_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lister(tmp_path, monkeypatch, """echo "{\\"absent\\": \\"$*\\"}" """)
    assert Listing().gpus() == {"absent": "-m cachesvc.mover --list"}


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo what hangs >&2; echo the driver broke >&2; exit 3", r"exit code 3 \(the driver broke\)"),
        ("echo no json", "Expecting value"),
    ],
)
def test_one_that_breaks_is_told_of_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    lister(tmp_path, monkeypatch, script)
    with pytest.raises(Unavailable, match=f"cannot be listed: .*{why}.*use --backend shm"):
        Listing().gpus()


def test_one_that_cannot_be_started_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(Unavailable, match="nothing"):
        Listing()
