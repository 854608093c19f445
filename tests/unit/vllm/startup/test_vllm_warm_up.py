"""vLLM's made-up requests before the first real one write to the page that is never granted."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from cachesvc_vllm.plain import WarmUp


class BlockTables:
    """Object of vLLM's runner that maps block ids."""

    redirect_writes_to_null_block = False


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> type[BlockTables]:
    """A vLLM with that runner."""
    path = "vllm.v1.worker.gpu.block_table"
    parts = path.split(".")
    for each in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:each]), ModuleType(".".join(parts[:each])))
    sys.modules[path].BlockTables = BlockTables  # type: ignore[attr-defined]
    return BlockTables


def is_redirected(runner: type[BlockTables]) -> bool:
    """True where the runner's ids are redirected now."""
    return runner.redirect_writes_to_null_block


def test_writes_go_to_page_0_until_vllm_serves(runner: type[BlockTables]) -> None:
    warm_up = WarmUp()
    warm_up.begin()
    assert is_redirected(runner)
    warm_up.end()
    assert not is_redirected(runner)
    runner.redirect_writes_to_null_block = True
    warm_up.end()  # in every step: a replacement by other code is left alone
    assert is_redirected(runner)
    runner.redirect_writes_to_null_block = False


def test_without_that_runner_there_is_nothing_to_do() -> None:
    warm_up = WarmUp()
    warm_up.begin()
    warm_up.end()
