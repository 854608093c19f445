"""A checkpoint's digest is of all its bytes, and is computed once."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from cachesvc_client.plugins.facts import (
    SETTLED_S,
    FileDigests,
    LoadedCheckpoints,
    Progress,
    checkpoint_digest,
    new_hasher,
)


def later() -> float:
    """A clock by which every file has its stamps for good."""
    return time.time() + SETTLED_S


@pytest.fixture
def digests(tmp_path: Path) -> FileDigests:
    return FileDigests(tmp_path / "digests", later)


def write(folder: Path, size_bytes: int = 1 << 20, seed: int = 0) -> Path:
    """A checkpoint of one file of weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(random.Random(seed).randbytes(size_bytes))
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return folder


def test_each_single_edit_of_a_checkpoint_changes_its_digest(tmp_path: Path, digests: FileDigests) -> None:
    folder, rng = write(tmp_path / "model", 16 << 20), random.Random(5)
    first = checkpoint_digest(str(folder), None, digests)
    weights, found = folder / "model.safetensors", set()
    for _ in range(60):
        size, status = rng.choice([1, 128, 8 << 10, 64 << 10, 1 << 20]), weights.stat()
        at = rng.randrange((16 << 20) - size)
        with weights.open("r+b") as file:
            file.seek(at)
            before = file.read(size)
            file.seek(at)
            file.write(bytes(each ^ 0xFF for each in before))
        os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
        found.add(checkpoint_digest(str(folder), None, digests))
    assert len(found - {first}) == 60


def test_a_folder_may_be_called_anything_and_its_files_may_not(tmp_path: Path, digests: FileDigests) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "deep" / "two")
    assert checkpoint_digest(str(one), None, digests) == checkpoint_digest(str(two), None, digests)
    (two / "generation_config.json").write_text('{"temperature": 0.7}', encoding="utf-8")
    assert checkpoint_digest(str(one), None, digests) == checkpoint_digest(str(two), None, digests)
    (two / "modeling_two.py").write_text("SCALE = 2", encoding="utf-8")
    assert checkpoint_digest(str(one), None, digests) != checkpoint_digest(str(two), None, digests)


def test_a_link_into_the_hubs_cache_is_its_blobs_name_and_is_not_read(tmp_path: Path, digests: FileDigests) -> None:
    blobs = tmp_path / "models--org--m" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / ("ab" * 32)).write_bytes(b"weights")
    (blobs / ("cd" * 20)).write_bytes(b"{}")  # of git: no digest of the bytes alone
    snapshot = tmp_path / "models--org--m" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blobs / ("ab" * 32))
    (snapshot / "config.json").symlink_to(blobs / ("cd" * 20))
    first = checkpoint_digest(str(snapshot), None, digests)
    (blobs / ("ab" * 32)).write_bytes(b"Weights")  # nothing does that; it shows that nothing reads them
    assert checkpoint_digest(str(snapshot), None, digests) == first
    (blobs / ("cd" * 20)).write_bytes(b"[]")
    assert checkpoint_digest(str(snapshot), None, digests) != first


def test_a_name_on_a_hub_is_a_commit_and_never_a_branch(digests: FileDigests) -> None:
    assert checkpoint_digest("org/model", "ab" * 20, digests) == f"org/model@{'ab' * 20}"
    for revision in (None, "main", "v1.0", "ab" * 10):
        with pytest.raises(FileNotFoundError, match="may move"):
            checkpoint_digest("org/model", revision, digests)


def test_a_second_start_reads_nothing_and_a_changed_file_is_read_again(tmp_path: Path, digests: FileDigests) -> None:
    path = write(tmp_path / "model") / "model.safetensors"
    read: list[int] = []

    class Counted(Progress):
        def add(self, size_bytes: int) -> None:
            read.append(size_bytes)

    first = digests.digest(path, Counted(0))
    assert digests.digest(path, Counted(0)) == first
    assert FileDigests(tmp_path / "digests", later).digest(path, Counted(0)) == first
    assert read == [1 << 20]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert digests.digest(path, Counted(0)) != first
    assert len(read) == 2


def test_what_changed_just_now_is_read_again(tmp_path: Path) -> None:
    path, folder = write(tmp_path / "model") / "model.safetensors", tmp_path / "digests"
    changed_s = path.stat().st_ctime
    FileDigests(folder, lambda: changed_s + SETTLED_S / 2).digest(path)
    assert [each for each in folder.iterdir() if not each.suffix] == []
    FileDigests(folder, lambda: changed_s + SETTLED_S).digest(path)
    assert [each for each in folder.iterdir() if not each.suffix] != []


def test_a_user_without_a_home_keeps_nothing_and_starts(tmp_path: Path) -> None:
    path = write(tmp_path / "model") / "model.safetensors"
    program = """
import os, sys
from pathlib import Path
from cachesvc_client.plugins.facts import FileDigests, cache_folder
print(cache_folder(), FileDigests().digest(Path(sys.argv[1])))
"""
    environment = {key: value for key, value in os.environ.items() if key not in ("HOME", "XDG_CACHE_HOME")}
    homeless = {**environment, "XDG_CACHE_HOME": "~no-such-user/cache"}
    said = subprocess.run(
        [sys.executable, "-c", program, str(path)], env=homeless, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()
    assert said == ["None", FileDigests(tmp_path / "kept").digest(path)]


@pytest.mark.parametrize("damage", [b"", b"blake2b:zz", b"\xff\xfe", b"x" * 100_000])
def test_an_entry_that_is_none_is_written_again(tmp_path: Path, digests: FileDigests, damage: bytes) -> None:
    path = write(tmp_path / "model") / "model.safetensors"
    first = digests.digest(path)
    (entry,) = [each for each in (tmp_path / "digests").iterdir() if not each.suffix]
    entry.write_bytes(damage)
    assert digests.digest(path) == first
    assert entry.read_text(encoding="ascii") == first


def test_what_another_user_may_write_is_not_believed(tmp_path: Path) -> None:
    path, folder = write(tmp_path / "model") / "model.safetensors", tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    first = FileDigests(folder, later).digest(path)
    assert list(folder.iterdir()) == []
    folder.chmod(0o700)
    assert FileDigests(folder, later).digest(path) == first
    (entry,) = [each for each in folder.iterdir() if not each.suffix]
    entry.write_text(f"blake2b:{'0' * 64}", encoding="ascii")
    entry.chmod(0o666)
    assert FileDigests(folder).digest(path) == first


def test_where_nothing_can_be_kept_files_are_hashed_each_time(tmp_path: Path) -> None:
    path, blocked = write(tmp_path / "model") / "model.safetensors", tmp_path / "file"
    blocked.write_bytes(b"")
    nowhere = FileDigests(blocked / "digests")
    assert nowhere.digest(path) == nowhere.digest(path) == FileDigests(tmp_path / "kept").digest(path)


def test_engines_that_start_together_hash_a_file_once(tmp_path: Path) -> None:
    path = write(tmp_path / "model", 32 << 20) / "model.safetensors"
    program = """
import sys
from pathlib import Path
from cachesvc_client.plugins.facts import FileDigests, Progress
class Counted(Progress):
    read = 0
    def add(self, size_bytes): Counted.read += size_bytes
print(FileDigests(Path(sys.argv[1]), lambda: float("inf")).digest(Path(sys.argv[2]), Counted(0)), Counted.read)
"""
    command: Sequence[str] = [sys.executable, "-c", program, str(tmp_path / "digests"), str(path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate()[0].split() for process in running]
    assert len({digest for digest, _ in said}) == 1
    assert sum(int(read) for _, read in said) == 32 << 20


def test_long_hashing_tells_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "cachesvc_client.plugins.facts")
    times = iter([0.0, 1.0, 6.0, 7.0, 12.0])
    progress = Progress(4 << 30, lambda: next(times))
    for _ in range(4):
        progress.add(1 << 30)
    told = [each.getMessage() for each in caplog.records]
    assert [each.split()[1] for each in told] == ["done_gib=2.0", "done_gib=4.0"]


def test_the_algorithm_is_a_part_of_the_digest(tmp_path: Path, digests: FileDigests) -> None:
    path = write(tmp_path / "model") / "model.safetensors"
    assert digests.digest(path).startswith(f"{new_hasher()[0]}:")


def replace_with(path: Path, content: bytes) -> None:
    """Put a new file in a file's place, as trainers and copying programs do."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "code.py", "added.safetensors"])
def test_files_that_are_replaced_behind_the_look_of_a_loader_are_noticed(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    loaded = LoadedCheckpoints(process_began_s=0.0)
    loaded.look(str(tmp_path))
    assert loaded.replaced(str(tmp_path)) == ""
    loaded.look(str(tmp_path))
    replace_with(tmp_path / name, b"weights")
    loaded.look(str(tmp_path))  # a drafter of the same folder
    assert "were replaced" in loaded.replaced(str(tmp_path))
    loaded.look(str(tmp_path))
    assert loaded.replaced(str(tmp_path)) == ""


def test_harmless_files_and_names_on_a_hub_are_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    loaded = LoadedCheckpoints(process_began_s=0.0)
    for each in (str(tmp_path), "org/model"):
        loaded.look(each)
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    assert [loaded.replaced(str(tmp_path)), loaded.replaced("org/model")] == ["", ""]


def test_without_a_look_nothing_may_have_changed_since_the_process_began(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    changed_s = file.stat().st_ctime
    assert "has changed" in LoadedCheckpoints(changed_s - 1.0).replaced(str(tmp_path))
    assert LoadedCheckpoints(changed_s + 1.0).replaced(str(tmp_path)) == ""


def test_a_process_knows_when_it_began() -> None:
    command = [
        sys.executable,
        "-c",
        "from cachesvc_client.plugins.facts import process_began_s; print(process_began_s())",
    ]
    before_s = time.time()
    began_s = float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    assert before_s - 0.1 <= began_s <= time.time()
