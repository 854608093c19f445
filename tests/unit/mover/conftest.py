"""Fixtures of the tests of movers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.mover.mover_rig import Heard, heard_from


@pytest.fixture
def heard() -> Iterator[Heard]:
    """Listener of the log of the daemon's side of movers."""
    with heard_from("cachesvc.mover.device") as handler:
        yield handler
