"""Fixtures of the chaos tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.rig import Node, running_node


@pytest.fixture
def node() -> Iterator[Node]:
    """A daemon of the test's own; its books must add up at the end."""
    with running_node() as running:
        yield running
