"""Tokens' files that are wrong in unusual ways: refused by name, and what was read before holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cachesvc.model.errors import InvalidRequest, Unauthenticated
from cachesvc.service.access.auth import Scope, names_of
from cachesvc.service.access.keyring import Keyring, read_keys

DIGEST = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of "secret"
GOOD = json.dumps({"token": [{"name": "a", "sha256": DIGEST, "scopes": ["admin"]}]})


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
    found = ring.find("secret", b"", ())
    assert found is not None
    assert (found.name, found.revoked) == ("a", False)
    with pytest.raises(Unauthenticated):
        ring.find("guess", b"", ())


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
