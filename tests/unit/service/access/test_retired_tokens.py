"""Tokens that leave the tokens' file: an engine's has a grace for the leases it has, and can be revoked at once."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachesvc.config import Config
from cachesvc.model.errors import InvalidRequest, Unauthenticated
from cachesvc.service.access import tokens
from cachesvc.service.access.auth import Caller, allow
from cachesvc.service.access.tokens import Keyring, read_keys

OLD, NEW, READER = "old token of enough letters", "new token of enough letters", "reader's token, long enough"
GRACE_SECONDS = 300.0
BEAT = "/kvcache.v1.LeaseService/KeepAlive"


def entry(token: str, scope: str = "engine", **more: Any) -> dict[str, Any]:
    """One [[token]]."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    return {"name": token[:3], "sha256": digest, "scopes": [scope], "tenant": "a", **more}


class Rotated:
    """A tokens' file, a clock, and a keyring that looks at both on request."""

    def __init__(self, folder: Path, grace_seconds: float = GRACE_SECONDS) -> None:
        self.path = folder / "tokens.json"
        self.seconds = 1000.0
        self.write(entry(OLD), entry(READER, "read-only"))
        self.ring = Keyring(str(self.path), lambda _: None, lambda: self.seconds, grace_seconds)
        self.ring.load()

    def write(self, *entries: dict[str, Any]) -> None:
        """Replace the file."""
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps({"token": entries}), encoding="utf-8")
        fresh.chmod(0o600)
        fresh.replace(self.path)

    def rotate(self, *entries: dict[str, Any]) -> None:
        """Replace the file, and read it."""
        self.write(*entries)
        self.ring.load()

    def passes(self, seconds: float) -> None:
        """So long passes, and the keyring looks."""
        self.seconds += seconds
        self.ring.look()

    def calls(self, token: str, method: str = BEAT) -> Caller:
        """The caller that shows a token, let through to a method. Raises as the guard does."""
        return allow(self.ring.find(token, b"", ()), method)


@pytest.fixture
def rotated(tmp_path: Path) -> Rotated:
    return Rotated(tmp_path)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Events of tokens since it was asked last."""
    caplog.set_level(logging.INFO)

    def take() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.getMessage().startswith("token_")]
        caplog.clear()
        return found

    return take


def test_a_replaced_token_serves_the_leases_of_its_engine_and_nothing_else(rotated: Rotated) -> None:
    before = rotated.calls(OLD)
    rotated.rotate(entry(NEW))
    for method in (BEAT, "/kvcache.v1.LeaseService/Close", "/kvcache.v1.CacheService/Step"):
        assert rotated.calls(OLD, method) is before, "what is open goes on"
    for method in (
        "/kvcache.v1.EngineService/Register",
        "/kvcache.v1.LeaseService/Open",
        "/kvcache.v1.EventService/Subscribe",
        "/kvcache.v1.AdminService/GetStatus",
        "/kvcache.v1.AdminService/Drain",
    ):
        with pytest.raises(Unauthenticated, match=r"'old' was replaced.*token_file="):
            rotated.calls(OLD, method)
        if "Admin" not in method:
            assert rotated.calls(NEW, method).name == "new"


def test_after_its_grace_it_is_refused_in_words(rotated: Rotated) -> None:
    rotated.rotate(entry(NEW))
    rotated.passes(GRACE_SECONDS - 1)
    caller = rotated.calls(OLD)
    rotated.passes(1)
    with pytest.raises(Unauthenticated, match="its grace is over; write the new token"):
        rotated.calls(OLD)
    with pytest.raises(Unauthenticated, match="its grace is over"):
        caller.check()
    rotated.passes(GRACE_SECONDS)
    with pytest.raises(Unauthenticated, match="its grace is over"):
        rotated.calls(OLD)


def test_tokens_of_others_than_engines_have_no_grace(rotated: Rotated) -> None:
    reader = rotated.calls(READER, "/kvcache.v1.AdminService/GetStatus")
    rotated.rotate(entry(NEW))
    with pytest.raises(Unauthenticated, match="no longer accepted"):
        reader.check()
    with pytest.raises(Unauthenticated, match="no longer accepted"):
        rotated.calls(READER)


def test_a_token_is_revoked_at_once_by_its_mark_or_where_there_is_no_grace(tmp_path: Path) -> None:
    rotated = Rotated(tmp_path)
    stream = rotated.calls(OLD)
    rotated.rotate(entry(NEW), {"name": "stolen", "sha256": entry(OLD)["sha256"], "revoked": True})
    with pytest.raises(Unauthenticated, match="no longer accepted"):
        stream.check()
    with pytest.raises(Unauthenticated, match="no longer accepted"):
        rotated.calls(OLD)
    rotated.rotate(entry(NEW))
    with pytest.raises(Unauthenticated, match="no longer accepted"):
        rotated.calls(OLD)  # the mark has no grace either
    strict = Rotated(tmp_path, grace_seconds=0)
    strict.rotate(entry(NEW))
    with pytest.raises(Unauthenticated, match="no longer accepted"):
        strict.calls(OLD)


def test_a_mark_ends_the_grace_of_a_token_that_was_replaced_before(rotated: Rotated) -> None:
    stream = rotated.calls(OLD)
    rotated.rotate(entry(NEW))
    rotated.calls(OLD)
    rotated.rotate(entry(NEW), entry(OLD, revoked=True))
    with pytest.raises(Unauthenticated):
        stream.check()
    with pytest.raises(Unauthenticated):
        rotated.calls(OLD)
    assert rotated.ring.tenants() == {"a"}


def test_a_token_that_comes_back_is_as_before(rotated: Rotated) -> None:
    before = rotated.calls(OLD)
    rotated.rotate(entry(NEW))
    rotated.rotate(entry(NEW), entry(OLD))
    assert rotated.calls(OLD, "/kvcache.v1.LeaseService/Open") is before
    rotated.passes(2 * GRACE_SECONDS)
    before.check()
    assert rotated.ring.retired_shown() == []


def test_an_entry_that_has_changed_ends_its_streams_and_counts_as_it_stands(rotated: Rotated) -> None:
    before = rotated.calls(OLD)
    rotated.rotate(entry(OLD, tenant="b"))
    with pytest.raises(Unauthenticated, match="no longer accepted"):
        before.check()
    assert rotated.calls(OLD).tenant == "b"


def test_callers_that_are_behind_are_named_once_and_shown_while_they_call(
    rotated: Rotated, said: Callable[[], list[str]]
) -> None:
    stream = rotated.calls(OLD)
    rotated.rotate(entry(NEW))
    assert said() == ["token_retired"]
    rotated.passes(10)
    assert (said(), rotated.ring.retired_shown()) == ([], []), "no caller shows it"
    for _ in range(3):
        stream.check()
        rotated.passes(1)
    assert said() == ["token_retired_shown"]
    assert rotated.ring.retired_shown() == [("old", "a", GRACE_SECONDS - 13)]
    rotated.passes(GRACE_SECONDS)
    for _ in range(3):
        with pytest.raises(Unauthenticated):
            stream.check()
        rotated.passes(1)
    assert said() == ["token_refused"]
    assert rotated.ring.retired_shown() == [("old", "a", 0.0)]
    rotated.passes(tokens.SHOWN_SECONDS + 1)
    assert rotated.ring.retired_shown() == []


def test_what_is_remembered_is_bounded(rotated: Rotated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MOST_REMEMBERED", 2)
    callers = []
    for number in range(4):
        token = f"{number} token of enough letters"
        rotated.rotate(entry(token))
        callers.append(rotated.calls(token))
    rotated.rotate()
    for caller in callers[:2]:
        with pytest.raises(Unauthenticated):
            caller.check()
    for caller in callers[2:]:
        caller.check()


@pytest.mark.parametrize("mark", ["yes", 1, None])
def test_a_mark_is_true_or_false(tmp_path: Path, mark: object) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps({"token": [entry(OLD, revoked=mark)]}), encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(InvalidRequest, match="revoked is true or false"):
        read_keys(path)


@pytest.mark.parametrize("seconds", [-1.0, 1e9, float("nan")])
def test_a_grace_that_cannot_be_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="token_grace_seconds must be from 0 to 86400"):
        Config(token_grace_seconds=seconds)
