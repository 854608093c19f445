"""Tokens' files that are wrong in unusual ways: refused by name, and what was read before holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cachesvc.model.errors import InvalidRequest, Unauthenticated
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
