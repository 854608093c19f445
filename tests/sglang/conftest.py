"""Fixtures of the tests with real SGLang engines: ``make sglang-test`` names a Python that has SGLang."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.sglang.rig import PYTHON_VARIABLE, SglangFleet, make_fleet
from tests.vllm.rig import Engine, engines

if PYTHON_VARIABLE not in os.environ:
    collect_ignore_glob = ["test_*.py"]

DEVICE_BLOCKS = 160
"""Fewer than the random requests have different blocks: what is coldest goes, and requests are retracted."""


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> SglangFleet:
    """Makes engines."""
    return make_fleet(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def plain(fleet: SglangFleet) -> Iterator[Engine]:
    """SGLang with its own radix cache."""
    with engines(fleet.engine(None, blocks=DEVICE_BLOCKS)) as (engine,):
        yield engine
