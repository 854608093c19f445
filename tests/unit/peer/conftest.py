"""A node that lends, and one beside it that asks and pulls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.peer.peer_rig import LendingNode, NearControl, Pulling


@pytest.fixture
def node() -> Iterator[LendingNode]:
    made = LendingNode()
    yield made
    made.close()


@pytest.fixture
def control(node: LendingNode) -> NearControl:
    return NearControl(node)


@pytest.fixture
def pulling(control: NearControl) -> Iterator[Pulling]:
    made = Pulling(control)
    yield made
    made.close()
