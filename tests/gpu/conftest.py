"""Fixtures of the tests that need a GPU. Without one they are skipped, with the driver's own reason; where there is
one, nothing is skipped for want of CuPy."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from gpu_ops.driver import CudaMissing
from gpu_ops.gpu import Gpu, find_gpus
from tests.e2e.rig import short_folder


@pytest.fixture(scope="session", autouse=True)
def gpu() -> Iterator[Gpu]:
    """The first GPU. Its context lives as long as the session: what CuPy and torch keep would die with it."""
    try:
        first = find_gpus()[0]
    except CudaMissing as missing:
        pytest.skip(str(missing))
    import_module("cupy")  # an error, and no reason to skip
    first.start()
    yield first
    first.close()


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh random numbers. A test that fails shows the seed among its captured output."""
    seed = secrets.randbits(64)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path."""
    with short_folder() as path:
        yield path
