"""List of GPUs from a process of its own: its answer is used, and its failure is reported."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from cachesvc.config import Config
from cachesvc.hardware import gpu_hardware, uses_vmm
from cachesvc.model.errors import Unavailable
from cachesvc.mover.__main__ import listed
from cachesvc.mover.life import Listing
from gpu_ops.gpu import GpuFacts

if TYPE_CHECKING:
    from gpu_ops.gpu import Gpu


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
    assert Listing().gpus() == {"absent": "-P -m cachesvc.mover --list"}


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


@dataclass
class ListedOne:
    """A GPU that is not there."""

    uuid: str
    has_vmm: bool

    @property
    def facts(self) -> GpuFacts:
        """Properties of the GPU."""
        return GpuFacts(self.uuid, 0, "a GPU", "0000:3b:00.0", 1 << 30, (9, 0), 1 << 20, has_vmm=self.has_vmm)

    def can_reach(self, other: ListedOne) -> bool:
        """None reaches another."""
        return False


@pytest.mark.parametrize("has_vmm", [True, False])
def test_a_daemon_takes_each_gpu_as_it_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_vmm: bool
) -> None:
    gpus = [ListedOne("GPU-1", True), ListedOne("GPU-2", has_vmm)]
    (tmp_path / "rows").write_text(json.dumps({"gpus": listed(cast("list[Gpu]", gpus))}), encoding="utf-8")
    lister(tmp_path, monkeypatch, f"cat {tmp_path / 'rows'}")
    hardware = gpu_hardware(Config(backend="cuda"), Listing())
    assert hardware.backend.devices() == ("GPU-1", "GPU-2")
    assert [record.getMessage() for record in caplog.records] == ([] if has_vmm else ["device_memory_by_handles"])


@pytest.mark.parametrize(
    ("setting", "lacking", "expected"),
    [
        ("auto", [], True),
        ("auto", ["GPU-2"], False),
        ("vmm", ["GPU-2"], True),
        ("ipc", [], False),
    ],
)
def test_device_memory_travels_by_descriptor_where_every_driver_has_it(
    setting: str, lacking: list[str], expected: bool
) -> None:
    assert uses_vmm(Config(device_memory=setting), lacking) is expected
