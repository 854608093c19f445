"""Folders of ``file`` that others have used: mount points, other programs', other users', with models' names."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from cachesvc.storage.file.disk import Disk
from cachesvc.storage.file.engine import FileOptions, FileStorage
from cachesvc.storage.file.folder import Folder
from cachesvc.storage.file.space import FORMAT_TEXT, object_path
from cachesvc.storage.seam import Outcome
from tests.contracts.storage_rig import SCOPE, Bench, FileTurning, name_of
from tests.contracts.test_storage_file import MIB, OK, opened, scanned
from tests.contracts.test_storage_file_order import until
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
    assert f"not ours (it has '{name}')" in refused(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("torn", "left"),
    [
        ("", ()),
        ("", ("objects", "daemons", "clock")),
        ("\0" * len(FORMAT_TEXT), ("objects", "clock")),
        (FORMAT_TEXT[:9], ("objects",)),
        (FORMAT_TEXT[:9] + "\0" * 20, ("daemons",)),
        (None, ("objects", "daemons", "clock")),
    ],
)
def test_what_a_power_cut_leaves_of_the_format_is_written_anew_beside_our_own_files(
    torn: str | None, left: tuple[str, ...], tmp_path: Path
) -> None:
    with opened(tmp_path) as bench:
        assert bench.keep([name_of("a")]) == [OK]
    for name in {"objects", "daemons", "clock"} - set(left):
        shutil.rmtree(tmp_path / name) if name != "clock" else (tmp_path / name).unlink()
    (tmp_path / "format").unlink()
    if torn is not None:
        (tmp_path / "format").write_text(torn, encoding="utf-8")
    for label in tmp_path.rglob("label"):
        label.write_bytes(b"")
    if "clock" in left:
        (tmp_path / "clock").write_bytes(b"\0" * 30)
    with opened(tmp_path) as bench:
        assert not bench.turning.backend.totals().problem
        scanned(bench)
        assert bench.fetch([name_of("a")]) == [OK if "objects" in left else Outcome.MISS]
        assert bench.keep([name_of("b")]) == [OK]
    assert (tmp_path / "format").read_text(encoding="utf-8") == FORMAT_TEXT


@pytest.mark.parametrize("content", ["cachesvc storage, files, format 99\n", FORMAT_TEXT + "more", "\udcff\udcfe"])
def test_a_folder_of_another_format_is_left_as_it_is(content: str, tmp_path: Path) -> None:
    (tmp_path / "format").write_bytes(content.encode(errors="surrogateescape"))
    assert "has another format" in refused(tmp_path)
    assert (tmp_path / "format").read_bytes() == content.encode(errors="surrogateescape")
    assert [each.name for each in tmp_path.iterdir()] == ["format"]


def test_a_torn_format_makes_nothing_ours_of_what_is_not(tmp_path: Path) -> None:
    (tmp_path / "format").touch()
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "pack").mkdir()
    assert "it has 'objects/pack'" in refused(tmp_path)
    assert (tmp_path / "format").read_bytes() == b""


@pytest.mark.parametrize(
    "what", ["foreign", "another format", "a file", "below a file", "a dangling link", "a link round"]
)
def test_a_folder_that_cannot_be_used_costs_storage_alone_until_it_is_right(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    if what in ("foreign", "another format"):
        folder.mkdir()
        (folder / ("format" if what == "another format" else "mine")).write_text("precious", encoding="utf-8")
    elif what in ("a file", "below a file"):
        folder.write_text("precious", encoding="utf-8")
    else:
        folder.symlink_to(tmp_path / ("cache" if what == "a link round" else "no/where"))
    used = folder / "below" if what == "below a file" else folder
    with opened(used, rescan=0.05) as bench:
        assert not bench.turning.backend.totals().is_usable
        assert bench.keep([name_of("a")]) == [Outcome.FAILED]
        assert bench.fetch([name_of("a")]) == [Outcome.FAILED]
        if folder.is_dir():
            shutil.rmtree(folder)
        else:
            folder.unlink()
        until(lambda: bench.turning.backend.totals().is_usable)
        scanned(bench)
        assert bench.keep([name_of("a")]) == [OK]
        assert bench.fetch([name_of("a")]) == [OK]


def test_a_change_of_state_of_a_folder_is_one_line_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (tmp_path / "mine").touch()
    with opened(tmp_path, rescan=0.01) as bench:
        for _ in range(3):
            refused_once = bench.turning.backend.totals()
            assert not refused_once.is_usable
        (tmp_path / "mine").unlink()
        until(lambda: bench.turning.backend.totals().is_usable)
        scanned(bench)
        shutil.rmtree(tmp_path)
        until(lambda: not bench.turning.backend.totals().is_usable)
        tmp_path.mkdir()
        until(lambda: bench.turning.backend.totals().is_usable)
    lines = ["storage_folder_refused", "storage_disk_takes_writes", "storage_folder_gone", "storage_disk_takes_writes"]
    assert [line for line in caplog.messages if "direct" not in line] == lines


def test_a_start_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    answers = threading.Event()

    class HungFolder(Folder):
        def claim(self) -> None:
            answers.wait()
            super().claim()

    turning = FileTurning(FileOptions(str(tmp_path / "cache"), capacity=64 * MIB, floor=0, rescan=0.05))
    backend = turning.backend = FileStorage(turning.options, folder=HungFolder)
    bench = Bench(turning)
    try:
        bench.start()
        assert not backend.totals().is_usable
        assert "has not answered" in backend.totals().problem
        assert backend.status().objects == 0
        assert bench.keep([name_of("a")]) == [Outcome.FAILED]
        answers.set()
        until(lambda: backend.totals().is_usable)
        scanned(bench)
        assert bench.keep([name_of("a")]) == [OK]
    finally:
        answers.set()
        turning.close()


def test_a_hung_disk_is_left_behind_at_the_end(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    (tmp_path / "clock").unlink()
    os.mkfifo(tmp_path / "clock")  # who reads it waits for a writer
    with opened(tmp_path) as bench:
        assert bench.keep([name_of("a")]) == [Outcome.BUSY], "nothing is known of the folder"
    assert any(thread.name == "storage-keeper" for thread in threading.enumerate()), "it hangs still"
    with os.fdopen(os.open(tmp_path / "clock", os.O_RDWR), "wb") as clock:
        clock.write(b"\n")
        clock.flush()


def newer(folder: Path, *keys: str, more: bytes = b"") -> dict[str, bytes]:
    """Objects as a newer release would have written them, by path."""
    found: dict[str, bytes] = {}
    for key in keys:
        path = object_path(folder / "objects", name_of(key))
        content = Path(path).read_bytes()
        found[path] = content[:7] + bytes([content[7] + 1]) + content[8:] + more
        Path(path).write_bytes(found[path])
    return found


@pytest.mark.parametrize("is_seen", [False, True], ids=["found by a get", "found by a start"])
@pytest.mark.parametrize("more", [b"", bytes(4096)], ids=["as long", "longer"])
def test_objects_of_a_newer_format_are_missing_count_and_stay(more: bytes, is_seen: bool, tmp_path: Path) -> None:
    names = [name_of("a"), name_of("b")]
    with opened(tmp_path) as bench:
        assert bench.keep(names) == [OK] * 2
        before = {} if is_seen else newer(tmp_path, "a", "b", more=more)
        if not is_seen:
            assert bench.fetch(names) == [Outcome.MISS] * 2
            assert bench.store.backend.expects(SCOPE, names[0].key, [names[0].part]) == 0
    before = before or newer(tmp_path, "a", "b", more=more)
    with opened(tmp_path) as bench:
        scanned(bench)
        status = bench.turning.backend.status()
        assert status.objects == 2
        assert status.size_bytes > 0, "they take room"
        assert bench.store.backend.expects(SCOPE, names[0].key, [names[0].part]) == 0
        assert bench.fetch(names) == [Outcome.MISS] * 2
        checked = bench.store.check_all()
        assert (checked.wrong, checked.missing) == (0, 2)
        assert {path: Path(path).read_bytes() for path in before} == before
        assert bench.keep(names[:1]) == [OK], "no other daemon is here: it is written again"
        assert bench.fetch(names[:1]) == [OK]
        assert bench.turning.backend.status().objects == 2


def test_objects_of_a_newer_daemon_on_the_folder_are_not_written_over(tmp_path: Path) -> None:
    with opened(tmp_path) as older, opened(tmp_path):
        assert older.keep([name_of("a")]) == [OK]
        before = newer(tmp_path, "a")
        assert older.fetch([name_of("a")]) == [Outcome.MISS]
        assert older.keep([name_of("a")]) == [Outcome.BUSY]
        assert {path: Path(path).read_bytes() for path in before} == before


def test_files_of_another_daemon_count_and_those_of_a_dead_one_go(tmp_path: Path) -> None:
    with opened(tmp_path, rescan=0.05) as bench:
        backend = bench.turning.backend
        assert isinstance(backend, FileStorage)
        other = Folder(str(tmp_path))
        other.claim()
        (other.mine / "1").write_bytes(bytes(MIB))
        until(lambda: backend.others_bytes >= MIB)
        left = tmp_path / "daemons" / ("d" * 16)
        left.mkdir()
        (left / "2").write_bytes(bytes(MIB))
        until(lambda: not left.exists())
        other.release()
        until(lambda: backend.others_bytes == 0)


def tell_problem(folder: Path) -> None:
    disk = Disk(Folder(str(folder)), lambda: 0.0, wants_direct=False)
    disk.look()
    raise RuntimeError(disk.problem)


def refused(folder: Path) -> str:
    """Reason why a folder is not used; the engine starts all the same."""
    with opened(folder) as bench:
        totals = bench.turning.backend.totals()
        assert not totals.is_usable
        return totals.problem


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_a_folder_of_another_user_is_told_with_whose_it_is() -> None:
    with short_folder() as parent:
        (parent / "cache").mkdir()
        parent.chmod(0o755)
        told = as_user(65534, lambda: tell_problem(parent / "cache"))
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
        until(lambda: list(Folder(str(tmp_path)).labels().values()) == ["old\\x07"])  # escaped when it is read
