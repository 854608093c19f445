"""Fixture of the client's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.rigs.client_rig import FakeDaemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    """A daemon that answers as the test says."""
    fake = FakeDaemon(tmp_path)
    fake.start()
    yield fake
    fake.close()
