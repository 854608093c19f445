"""Tokens' files that are wrong in unusual ways: refused by name, and what was read before holds."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

import pytest

from cachesvc.model.errors import InvalidRequest, Unauthenticated
from cachesvc.service.access.auth import Scope, names_of
from cachesvc.service.access.tokens import MIN_TOKEN_CHARACTERS, Keyring, read_keys

TOKEN = "a secret of enough letters"
DIGEST = hashlib.sha256(TOKEN.encode()).hexdigest()
GOOD = json.dumps({"token": [{"name": "a", "sha256": DIGEST, "scopes": ["admin"]}]})


class Watched:
    """A tokens' file, a keyring that reads it on command, and what the log had."""

    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.path = folder / "tokens.json"
        self.seconds = 1000.0
        self.ring = Keyring(str(self.path), lambda _: None, lambda: self.seconds)
        self._caplog = caplog
        self.write(GOOD)
        self.ring.load()

    def write(self, text: str) -> None:
        """Replace the file."""
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text, encoding="utf-8")
        fresh.chmod(0o600)
        fresh.replace(self.path)

    def looks(self, seconds: int) -> list[str]:
        """Log of that number of looks, one a second."""
        self._caplog.clear()
        for _ in range(seconds):
            self.seconds += 1
            self.ring.look()
        return [record.getMessage() for record in self._caplog.records]


@pytest.fixture
def watched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Watched:
    caplog.set_level(logging.INFO)
    return Watched(tmp_path, caplog)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"peer": [{"uid": 1, "scopes": ["engine"], "tenant": "\\ud800"}]}',
        f'{{"quota": {{"default": {{"device_bytes": "{"9" * 400}"}}}}}}',
        f'{{"quota": {{"default": {{"leases": {"9" * 5000}}}}}}}',
    ],
    ids=["deep", "half a letter", "a size without end", "a number without end"],
)
def test_a_file_that_is_wrong_changes_nothing_and_is_told_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(GOOD, encoding="utf-8")
    path.chmod(0o600)
    ring = Keyring(str(path), lambda _: None)
    ring.load()
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidRequest, match=r"tokens\.json"):
        read_keys(path)
    ring.reload()
    found = ring.find(TOKEN, b"", ())
    assert found is not None
    assert (found.name, found.revoked) == ("a", False)
    with pytest.raises(Unauthenticated):
        ring.find("guess" * 8, b"", ())


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("token", {"sha256": DIGEST, "scopes": ["metrics", "admin"]}),
        ("token", {"sha256": DIGEST, "scopes": ["metrics"], "tenant": "a"}),
        ("certificate", {"name": "node7", "scopes": ["metrics"]}),
        ("peer", {"uid": 7, "scopes": ["metrics"]}),
    ],
)
def test_what_opens_the_page_of_metrics_opens_nothing_else(tmp_path: Path, kind: str, more: dict[str, object]) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps({kind: [{"name": "a", **more}]}), encoding="utf-8")
    with pytest.raises(InvalidRequest, match="scope metrics is for a token of its own"):
        read_keys(path)


def test_a_certificate_may_read_unless_its_entry_says_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    entries = [{"name": "reads"}, {"name": "all", "scopes": ["admin"]}]
    path.write_text(json.dumps({"certificate": entries}), encoding="utf-8")
    callers = read_keys(path).callers
    assert callers["certificate", "reads"].scopes == {Scope.READ}
    assert callers["certificate", "all"].scopes == {Scope.ADMIN}
    path.write_text(json.dumps({"token": [{"name": "a", "sha256": DIGEST}]}), encoding="utf-8")
    with pytest.raises(InvalidRequest, match="scopes are a list"):
        read_keys(path)


def test_which_names_of_a_certificate_count() -> None:
    alternative = "x509_subject_alternative_name"
    full = {
        "x509_common_name": [b"boss"],
        alternative: [b"router.example.org", b"spiffe://a/b", b"boss@example.org", b"10.0.0.7"],
        "peer_dns": [b"router.example.org"],
        "peer_uri": [b"spiffe://a/b"],
        "peer_email": [b"boss@example.org"],
        "peer_ip": [b"10.0.0.7"],
    }
    assert names_of(full) == ["router.example.org", "spiffe://a/b"]
    mail = {"x509_common_name": [b"boss"], alternative: [b"boss@example.org"], "peer_email": [b"boss@example.org"]}
    assert names_of(mail) == []
    assert names_of({"x509_common_name": [b"boss"]}) == ["boss"]


def test_a_file_that_is_gone_is_told_until_it_is_back_and_revokes_nobody_meanwhile(watched: Watched) -> None:
    assert watched.looks(5) == []
    watched.path.unlink()
    assert watched.looks(1) == [], "it may be on its way"
    assert watched.looks(1) == ["tokens_not_read"]
    assert watched.ring.stale_seconds > 0
    assert watched.ring.find(TOKEN, b"", ()) is not None, "a slip stops no engine"
    assert watched.looks(180) == ["tokens_not_read"] * 3, "once a minute"
    assert watched.ring.stale_seconds == 180
    watched.ring.reload()
    watched.write(json.dumps({"token": []}))
    assert watched.looks(1) == ["tokens_read"]
    assert watched.ring.stale_seconds == 0
    with pytest.raises(Unauthenticated):
        watched.ring.find(TOKEN, b"", ())
    assert watched.looks(100) == ["token_refused"], "who is refused is named once"


def test_a_file_that_is_wrong_is_told_again_too(watched: Watched) -> None:
    watched.write("{")
    assert watched.looks(61) == ["tokens_not_read"] * 2
    assert watched.ring.stale_seconds == 60
    watched.write(GOOD)
    assert watched.looks(1) == ["tokens_read"]
    assert watched.ring.stale_seconds == 0


def test_a_file_that_is_replaced_is_read_and_nothing_is_said_of_a_gap(watched: Watched) -> None:
    watched.path.unlink()
    assert watched.looks(1) == []
    watched.write(GOOD)
    assert watched.looks(1) == ["tokens_read"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_file_of_another_user_is_none(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(GOOD, encoding="utf-8")
    path.chmod(0o600)
    os.chown(path, 12345, 0)
    with pytest.raises(InvalidRequest, match="belongs to user 12345; chown it"):
        read_keys(path)
    os.chown(path, 0, 0)
    assert read_keys(path).callers


def test_a_token_that_can_be_guessed_opens_nothing(watched: Watched) -> None:
    short = "x" * (MIN_TOKEN_CHARACTERS - 1)
    known = [
        {"name": token, "sha256": hashlib.sha256(token.encode()).hexdigest(), "scopes": ["admin"]}
        for token in (short, short + "x")
    ]
    watched.write(json.dumps({"token": known}))
    watched.ring.load()
    with pytest.raises(Unauthenticated, match="openssl rand -base64 32"):
        watched.ring.find(short, b"", ())
    assert watched.ring.find(short + "x", b"", ()) is not None
