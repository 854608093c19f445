"""The sessions of docs/inspecting.md: every command still runs, and still says things of that shape."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvcache.v1 import admin_pb2, common_pb2, inspect_pb2

from tests.e2e.remote import ROOT
from tools.lively import lively_daemon
from tools.sessions import BUF, DOCUMENT, SESSIONS, documented, record, shape, table

LAST = "drain"
"""It ends the daemon's willingness to serve."""


@pytest.fixture(scope="module")
def socket() -> Iterator[str]:
    with lively_daemon() as daemon:
        yield daemon.socket


def shown() -> dict[str, list[tuple[str, str]]]:
    return dict(documented(DOCUMENT.read_text(encoding="utf-8")))


def test_every_session_is_recorded_and_every_picture_is_there() -> None:
    assert list(shown()) == [name for name in shown() if name in SESSIONS]
    assert shown().keys() == SESSIONS.keys()
    assert list(SESSIONS)[-1] == LAST
    for name in ("top.svg", "web.png"):
        assert f"](images/{name})" in DOCUMENT.read_text(encoding="utf-8")
        assert (ROOT / "docs" / "images" / name).stat().st_size > 10_000
    assert table() in DOCUMENT.read_text(encoding="utf-8"), "run python -m tools.sessions"


@pytest.mark.skipif(not BUF.exists(), reason="buf is not installed here; `make test` does that")
@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_says_what_the_document_shows(name: str, socket: str, tmp_path: Path) -> None:
    now = record(name, socket, tmp_path)
    for (typed, said), (_, told) in zip(now, shown()[name], strict=True):
        fresh, written = shape(said), shape(told)
        assert type(fresh) is type(written)
        if isinstance(fresh, str):
            assert fresh == written, typed
        elif isinstance(written, set):
            assert written <= known_names() | fresh, f"{typed}: fields that are no more"
            assert fresh & written, typed


def known_names() -> set[str]:
    """Every field that the API has, as JSON calls it."""
    modules = (admin_pb2, inspect_pb2, common_pb2)
    messages = [message for module in modules for message in module.DESCRIPTOR.message_types_by_name.values()]
    return {field.json_name for message in messages for field in message.fields}
