"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cachesvc_client.wire.settings import TRANSPORT_VARIABLE

from tests.e2e.rig import Node, running_node, short_folder


@pytest.fixture
def node() -> Iterator[Node]:
    """A daemon of the test's own; its books must add up at the end."""
    with running_node() as running:
        yield running


@pytest.fixture(params=["auto", "grpc"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of this process and of those that it starts take the lane, and then gRPC."""
    monkeypatch.setenv(TRANSPORT_VARIABLE, request.param)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path."""
    with short_folder() as path:
        yield path
