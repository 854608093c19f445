"""Adapters are distinguished by their files, whatever they are called, and only for as long as these stay."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from cachesvc_vllm.namespace.adapters import CONFIG, LOOK_S, Adapters

WEIGHTS = "adapter_model.safetensors"


@dataclass
class LoRARequest:
    """Stand-in for vLLM's own."""

    lora_path: str
    lora_int_id: int = 1
    lora_name: str = "a"


@contextmanager
def adapters(locate: Callable[[str], str] = str, clock: Callable[[], float] = lambda: 0.0) -> Iterator[Adapters]:
    """Those of an engine."""
    made = Adapters(locate, clock)
    try:
        yield made
    finally:
        made.close()


def salt_of(made: Adapters, asked: LoRARequest) -> bytes:
    """Once its files were read."""
    while (salt := made.salt(asked)) is None:
        pass
    return salt


def first_salt(folder: Path) -> bytes:
    """Salt of an engine that starts now."""
    with adapters() as made:
        return salt_of(made, LoRARequest(str(folder)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter."""
    made = tmp_path / "adapter"
    made.mkdir()
    (made / WEIGHTS).write_bytes(os.urandom(1000))
    (made / CONFIG).write_text('{"r": 8}')
    return made


def test_equal_files_give_equal_salts_and_other_ones_others(folder: Path) -> None:
    first = first_salt(folder)
    assert len(first) == 32
    assert first_salt(folder) == first
    (folder / "README.md").write_text("words")
    assert first_salt(folder) == first
    (folder / CONFIG).write_text('{"r": 9}')
    assert first_salt(folder) != first
    (folder / CONFIG).write_text('{"r": 8}')
    assert first_salt(folder) == first
    (folder / WEIGHTS).write_bytes(os.urandom(1000))
    assert first_salt(folder) != first


def test_a_request_without_an_adapter_has_no_salt() -> None:
    with adapters() as made:
        assert made.salt(None) == b""


def test_nothing_is_waited_for_while_files_are_read(folder: Path) -> None:
    may_read = threading.Event()

    def locate(path: str) -> str:
        may_read.wait()
        return path

    with adapters(locate) as made:
        asked = LoRARequest(str(folder))
        assert made.salt(asked) is None
        assert made.salt(asked) is None
        may_read.set()
        assert salt_of(made, asked) == first_salt(folder)


def test_an_engine_whose_adapter_s_files_change_shares_nothing_under_it(folder: Path) -> None:
    now = [0.0]
    with adapters(clock=lambda: now[0]) as made:
        asked = LoRARequest(str(folder))
        before = salt_of(made, asked)
        (folder / WEIGHTS).write_bytes(os.urandom(1001))
        now[0] += LOOK_S
        own = salt_of(made, asked)
        assert own not in (before, first_salt(folder))
        assert salt_of(made, asked) == own
        assert salt_of(made, LoRARequest(str(folder), lora_int_id=2)) == first_salt(folder)


def test_a_number_that_comes_to_mean_another_folder_is_shared_by_nobody(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    with adapters() as made:
        before = salt_of(made, LoRARequest(str(folder)))
        own = salt_of(made, LoRARequest(str(other)))
        assert own != before
        assert salt_of(made, LoRARequest(str(folder))) == own


def test_what_cannot_be_read_is_shared_with_nobody(tmp_path: Path) -> None:
    for missing in (tmp_path / "nowhere", tmp_path):
        asked = LoRARequest(str(missing))
        with adapters() as one, adapters() as other:
            assert salt_of(one, asked) == salt_of(one, asked) != salt_of(other, asked)


def test_no_call_touches_a_file_and_one_in_a_second_has_them_looked_at(folder: Path) -> None:
    """Once the thread that reads has ended, every further look raises."""
    now = [0.0]
    with adapters(clock=lambda: now[0]) as made:
        asked = LoRARequest(str(folder))
        first = salt_of(made, asked)
        made.close()
        shutil.rmtree(folder)
        now[0] += LOOK_S / 2
        assert [made.salt(asked) for _ in range(100)] == [first] * 100
        now[0] += LOOK_S / 2
        with pytest.raises(RuntimeError, match="after shutdown"):
            made.salt(asked)


def test_any_error_of_finding_an_adapter_keeps_it_apart(folder: Path) -> None:
    def locate(path: str) -> str:
        raise ValueError(f"no repository is called {path}")

    with adapters(locate) as one, adapters(locate) as other:
        asked = LoRARequest(str(folder))
        assert salt_of(one, asked) == salt_of(one, asked) != salt_of(other, asked)
