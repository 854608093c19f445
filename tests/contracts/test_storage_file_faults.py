"""``file`` on a filesystem that is full at the start, loses its folder, or removes no file."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachesvc.storage.file.catalogue import Catalogue, Entry
from cachesvc.storage.file.disk import REFUSED_SECONDS, Disk
from cachesvc.storage.file.folder import Folder
from cachesvc.storage.file.space import FLOOR_EVERY, FORMAT_TEXT, LABEL, Space, object_path
from cachesvc.storage.seam import ObjectName, Outcome
from tests.contracts.storage_rig import SCOPE, name_of
from tests.contracts.test_storage_file import BUSY, MIB, OK, opened, scanned
from tests.contracts.test_storage_file_order import until

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


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)


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
            assert "is full" in bench.turning.backend.totals().problem
            (folder / "of another program").unlink()


@pytest.mark.parametrize("remade", ["by the operator", "moved back"])
def test_a_folder_that_goes_while_the_daemon_runs_is_gone_and_taken_again(remade: str, tmp_path: Path) -> None:
    folder, aside = tmp_path / "cache", tmp_path / "aside"
    gone: list[ObjectName] = []
    with opened(folder, rescan=0.05) as bench:
        backend = bench.turning.backend
        backend.watch(gone.extend)
        backend.describe(SCOPE, "a model")
        assert bench.keep([name_of("a")]) == [OK]
        folder.rename(aside)
        assert {bench.keep([name_of(f"{at}")])[0] for at in range(3 * FLOOR_EVERY)} == {Outcome.FAILED}
        until(lambda: not backend.totals().is_usable)
        assert bench.fetch([name_of("a")]) == [Outcome.FAILED], "no miss: nothing can be said of it"
        assert str(folder) in backend.totals().problem
        assert backend.totals().losses == 1
        assert not folder.exists(), "it may be a mount point: nothing is made there"
        if remade == "moved back":
            aside.rename(folder)
        else:
            folder.mkdir()
        until(lambda: backend.totals().is_usable)
        scanned(bench)
        assert bench.fetch([name_of("a")]) == [OK if remade == "moved back" else Outcome.MISS]
        assert bench.keep([name_of("b")]) == [OK]
        assert backend.totals().problem == ""
        assert backend.status().scopes[SCOPE].label == "a model"
    with opened(folder) as bench:
        assert bench.turning.backend.status().scopes[SCOPE].label == "a model"


def test_a_disk_that_is_unmounted_is_gone_and_its_mount_point_is_left_alone(tmp_path: Path) -> None:
    with small_filesystem(tmp_path / "small") as folder:
        with opened(folder, rescan=0.05) as bench:
            assert bench.keep([name_of("a")]) == [OK]
            subprocess.run(["umount", "-l", str(folder)], check=True)
            until(lambda: not bench.turning.backend.totals().is_usable)
            assert bench.keep([name_of("b")]) == [Outcome.FAILED]
            assert list(folder.iterdir()) == [], "on the disk below it nothing was written"
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True)


def test_a_folder_that_another_has_replaced_between_two_looks_is_found_anew(tmp_path: Path) -> None:
    """Stands for a mount that comes late, over what the daemon has begun below it."""
    folder, mounted = tmp_path / "cache", tmp_path / "mounted"
    with opened(mounted) as bench:
        assert bench.keep([name_of("there before")]) == [OK]
    with opened(folder, rescan=3600.0) as bench:
        scanned(bench)
        assert bench.keep([name_of("a")]) == [OK]
        folder.rename(tmp_path / "below")
        mounted.rename(folder)
        assert bench.fetch([name_of("a")]) == [Outcome.MISS]
        assert bench.keep([name_of("b")]) == [Outcome.FAILED], "its own place is gone, and the next look finds that"
        until(lambda: bench.keep([name_of("b")]) == [OK])
        assert bench.turning.backend.totals().objects == 2, "what was there before, and b"
        assert bench.turning.backend.totals().losses == 1
        assert len(list((folder / "daemons").iterdir())) == 1


def test_a_folder_that_comes_back_and_takes_no_label_is_counted_all_the_same(tmp_path: Path) -> None:
    folder, aside = tmp_path / "cache", tmp_path / "aside"
    with opened(folder, rescan=0.05) as bench:
        backend = bench.turning.backend
        backend.describe(SCOPE, "a model")
        assert bench.keep([name_of("a")]) == [OK]
        folder.rename(aside)
        until(lambda: not backend.totals().is_usable)
        label = Path(object_path(aside / "objects", name_of("a"))).parents[1] / LABEL
        label.unlink(missing_ok=True)
        label.mkdir()
        aside.rename(folder)
        until(lambda: backend.totals().is_usable)
        scanned(bench)
        assert backend.totals().objects == 1
        assert bench.fetch([name_of("a")]) == [OK]


def test_a_claim_that_failed_leaves_the_places_of_others_alone(tmp_path: Path) -> None:
    Folder(str(tmp_path)).claim()
    with small_filesystem(tmp_path / "mounted") as other:
        daemons = tmp_path / "daemons"
        subprocess.run(["mount", "--bind", str(other), str(daemons)], check=True)
        try:
            lock = daemons / "of another" / "lock"
            lock.parent.mkdir()
            with lock.open("w", encoding="utf-8") as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                folder = Folder(str(tmp_path))
                with pytest.raises(OSError, match="cross-device"):
                    folder.claim()
                folder.release()
                assert lock.exists()
        finally:
            subprocess.run(["umount", "-l", str(daemons)], check=True)


def test_a_scan_that_broke_is_done_again_whole_before_anything_is_written(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    with opened(tmp_path) as bench:
        assert bench.keep([name_of("a"), name_of("b")]) == [OK] * 2
    for scope, path in folder.changed(anew=True):
        folder.look(scope, path)
    assert list(folder.changed(anew=False)) == []
    assert len(list(folder.changed(anew=True))) == 2


def test_a_disk_that_is_mounted_for_reading_is_read_and_written_again_when_it_can_be(tmp_path: Path) -> None:
    with small_filesystem(tmp_path / "small") as folder:
        names = [name_of("a"), name_of("b")]
        with opened(folder / "cache") as bench:
            assert bench.keep(names) == [OK] * 2
        remount(folder, "ro")
        with opened(folder / "cache", rescan=0.05) as bench:
            scanned(bench)
            assert bench.fetch(names) == [OK] * 2
            assert bench.keep([name_of("c")]) == [BUSY]
            assert bench.turning.backend.totals().is_usable
            assert "takes no writes" in bench.turning.backend.totals().problem
            remount(folder, "rw")
            until(lambda: not bench.turning.backend.totals().problem)
            scanned(bench)
            assert bench.keep([name_of("c")]) == [OK]
            assert bench.fetch(names) == [OK] * 2


@pytest.mark.parametrize(
    ("number", "is_refused"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EROFS, True), (errno.EIO, False)]
)
def test_a_disk_that_takes_no_writes_is_tried_again_and_one_that_errs_has_failed(
    number: int, is_refused: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    now, folder = [100.0], Folder(str(tmp_path / "cache"))
    disk = Disk(folder, lambda: now[0], wants_direct=False)
    assert disk.look()
    for _ in range(50):
        assert disk.refuse(OSError(number, "as the kernel says"), 4096) is is_refused
    assert disk.takes_writes is not is_refused
    assert bool(disk.problem) is is_refused
    now[0] += REFUSED_SECONDS
    assert disk.takes_writes
    assert not disk.look()
    assert disk.problem == "", "it was tried without a write of an engine's"
    lines = ["storage_disk_refuses", "storage_disk_takes_writes"] if is_refused else []
    assert [line for line in caplog.messages if "direct" not in line] == lines
    folder.release()


def test_a_disk_that_is_away_at_the_start_costs_no_start(tmp_path: Path) -> None:
    with small_filesystem(tmp_path / "small") as folder:
        remount(folder, "ro")
        with opened(folder / "cache", rescan=0.05) as bench:
            assert not bench.turning.backend.totals().is_usable
            assert bench.keep([name_of("a")]) == [Outcome.FAILED]
            remount(folder, "rw")
            until(lambda: bench.turning.backend.totals().is_usable)
            scanned(bench)
            assert bench.keep([name_of("a")]) == [OK]


def test_less_than_the_floor_is_told(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", floor=1 << 60) as bench:
        assert bench.keep([name_of("a")]) == [BUSY]
        assert "floor" in bench.turning.backend.totals().problem


def test_what_a_daemon_left_that_died_in_its_claim_is_removed(tmp_path: Path) -> None:
    for name in ("claim.dead", "daemons/dead"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "17").write_bytes(bytes(4096))
    (tmp_path / "claim.dead" / "lock").touch()
    (tmp_path / "format.1234").write_text("cachesvc", encoding="utf-8")
    (tmp_path / "format").write_text(FORMAT_TEXT, encoding="utf-8")
    with opened(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["clock", "daemons", "format", "objects"]
        assert len(list((tmp_path / "daemons").iterdir())) == 1


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
