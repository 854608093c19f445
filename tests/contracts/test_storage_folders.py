"""Folders of ``file`` that others have used: mount points, other programs', other users', with models' names."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from cachesvc.model.errors import InvalidRequest
from cachesvc.storage.file.disk import Disk
from cachesvc.storage.file.folder import Folder
from tests.contracts.storage_rig import SCOPE, name_of
from tests.contracts.test_storage_file import OK, opened
from tests.e2e.rig import short_folder
from tests.other_user import as_user
from tests.sim.sim_storage import SimStorage
from tests.unit.storage.storage_tier_rig import TierRig


@pytest.mark.parametrize(
    "name",
    ["lost+found", ".snapshot", ".Trash-1000", "System Volume Information", "aquota.user", ".nfs00000000a1", ".zfs"],
)
def test_a_mount_point_is_taken_with_what_it_came_with(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / name / "#12").write_text("recovered", encoding="utf-8")
    with opened(tmp_path) as bench:
        assert bench.keep([name_of("a")]) == [OK]
    assert (tmp_path / name / "#12").read_text(encoding="utf-8") == "recovered"


@pytest.mark.parametrize("name", ["data", "lost+found2", ".config", "my.nfs"])
def test_a_folder_of_something_else_is_refused_by_the_name_of_what_it_has(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(InvalidRequest, match=f"not ours .it has '{re.escape(name)}'"), opened(tmp_path):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_a_folder_of_another_user_is_told_with_whose_it_is() -> None:
    with short_folder() as parent:
        (parent / "cache").mkdir()
        parent.chmod(0o755)
        told = as_user(65534, lambda: Disk(Folder(str(parent / "cache")), lambda: 0.0, wants_direct=False).start())
    assert "which belongs to user 0 (this daemon is user 65534)" in told
    assert "that the daemon's user may write to" in told


def test_the_name_of_a_model_reaches_its_file_escaped(tmp_path: Path) -> None:
    rig = TierRig(engine=SimStorage())
    rig.model.name = "m\x1b[2J\n-rw-r--r-- root"
    rig.tier.shapes(rig.model)
    assert list(rig.engine.labels.values()) == ["m\\x1b[2J\\n-rw-r--r-- root"]
    with opened(tmp_path) as bench:
        bench.turning.backend.describe(SCOPE, "old\x07")
        bench.keep([name_of("a")])
        assert list(Folder(str(tmp_path)).labels().values()) == ["old\\x07"], "one of before is escaped when it is read"
