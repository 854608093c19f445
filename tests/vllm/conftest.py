"""Fixtures of the tests with real vLLM engines. They need a Python that has vLLM, which ``make vllm-test`` names."""

from __future__ import annotations

import os

import pytest

from tests.vllm.rig import PYTHON_VARIABLE, Fleet, make_fleet

if PYTHON_VARIABLE not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Makes engines."""
    return make_fleet(tmp_path_factory.mktemp("model"))
