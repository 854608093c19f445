"""Fixtures of the tests with real vLLM engines. They need a Python that has vLLM, which ``make vllm-test`` names."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.vllm.rig import PYTHON_VARIABLE, Engine, Fleet, engines, make_fleet

if PYTHON_VARIABLE not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Makes engines."""
    return make_fleet(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def plain(fleet: Fleet) -> Iterator[Engine]:
    """vLLM without a connector, and without its own prefix cache."""
    with engines(fleet.engine(None, caching=False)) as (engine,):
        yield engine
