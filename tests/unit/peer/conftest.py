"""A node that lends, and one beside it that asks and pulls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

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
def pull() -> Iterator[Callable[..., Pulling]]:
    """Makes borrowers that are closed at the end."""
    with ExitStack() as stack:
        yield lambda *controls, **more: stack.enter_context(closing(Pulling(*controls, **more)))


@pytest.fixture
def pulling(control: NearControl, pull: Callable[..., Pulling]) -> Pulling:
    return pull(control)
