"""``file`` on a filesystem that is full at the start, loses its folder, or removes no file."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachesvc.model.errors import InvalidRequest
from cachesvc.storage.file.catalogue import Catalogue, Entry
from cachesvc.storage.file.folder import Folder
from cachesvc.storage.file.paths import object_path
from cachesvc.storage.file.space import FLOOR_EVERY, Space
from cachesvc.storage.seam import Outcome
from tests.contracts.storage_rig import SCOPE, name_of
from tests.contracts.test_storage_file import BUSY, MIB, OK, opened
from tests.e2e.rig import short_folder
from tests.other_user import as_user
from tests.sim.sim_storage import SimStorage
from tests.unit.storage.storage_tier_rig import TierRig

OBJECTS = 8


@contextmanager
def small_filesystem(folder: Path) -> Iterator[Path]:
    """A filesystem of 4 MiB."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs may be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_filesystem_that_is_full_at_the_start_is_read_and_costs_no_start(tmp_path: Path) -> None:
    with small_filesystem(tmp_path / "small") as folder:
        names = [name_of("a"), name_of("b")]
        with opened(folder / "cache") as bench:
            assert bench.keep(names) == [OK] * 2
        with (folder / "of another program").open("wb") as other:
            left = os.statvfs(folder)
            os.posix_fallocate(other.fileno(), 0, left.f_bavail * left.f_frsize)
        with opened(folder / "cache") as bench:
            assert bench.fetch(names) == [OK] * 2
            assert bench.keep([name_of("c")]) == [BUSY]
            (folder / "of another program").unlink()


def test_a_folder_that_was_removed_is_a_failure_and_no_lack_of_room(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as bench:
        assert bench.keep([name_of("a")]) == [OK]
        shutil.rmtree(tmp_path / "cache")
        told = [bench.keep([name_of(f"{at}")])[0] for at in range(3 * FLOOR_EVERY)]
        assert set(told) == {Outcome.FAILED}


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
        told = as_user(65534, lambda: Folder(str(parent / "cache")).claim())
    assert "which belongs to user 0 (this daemon is user 65534)" in told
    assert "make it writable for the daemon's user" in told


def test_the_name_of_a_model_reaches_its_file_escaped(tmp_path: Path) -> None:
    rig = TierRig(engine=SimStorage())
    rig.model.name = "m\x1b[2J\n-rw-r--r-- root"
    rig.tier.shapes(rig.model)
    assert list(rig.engine.labels.values()) == ["m\\x1b[2J\\n-rw-r--r-- root"]
    with opened(tmp_path) as bench:
        bench.turning.backend.describe(SCOPE, "old\x07")
        bench.keep([name_of("a")])
        assert list(Folder(str(tmp_path)).labels().values()) == ["old\\x07"], "one of before is escaped when it is read"


@pytest.mark.parametrize("wanted", [MIB, MIB // 2])
def test_files_that_cannot_be_removed_still_count_and_are_named(
    wanted: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    catalogue = Catalogue()
    space = Space(catalogue, tmp_path / "objects", OBJECTS * MIB, 0)
    space.mine = tmp_path / "no such folder" if wanted == MIB else tmp_path
    names = [name_of(f"{at}") for at in range(OBJECTS)]
    for name in names:
        stays = Path(object_path(tmp_path / "objects", name))
        (stays / "is a folder").mkdir(parents=True)  # no file of this name can be unlinked
    catalogue.add_all([Entry(name, MIB, 1) for name in names])
    if wanted == MIB:
        space.mine.write_text("no folder: nothing can be moved there", encoding="utf-8")
    for _ in range(3):
        assert space.take(wanted) is None
        assert space.used_bytes == OBJECTS * MIB
        assert space.shrink(2) == 0
    assert (len(catalogue), space.evicted_objects) == (OBJECTS, 0)
    assert caplog.messages == ["storage_not_removed"], "once a minute"
    shutil.rmtree(tmp_path / "objects")
    (tmp_path / "objects").mkdir()
    room = space.take(MIB // 2)
    assert room is not None


def test_many_objects_that_cannot_be_read_are_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with opened(tmp_path / "cache") as bench:
        names = [name_of(f"{at}") for at in range(OBJECTS)]
        assert bench.keep(names) == [OK] * OBJECTS
        for name in names:
            path = Path(object_path(tmp_path / "cache" / "objects", name))
            path.unlink()
            path.mkdir()
        assert bench.fetch(names) == [Outcome.FAILED] * OBJECTS
    assert caplog.messages.count("storage_read_failed") == 1
