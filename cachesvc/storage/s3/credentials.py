"""Credentials from the shared file of AWS tools, which the library does not read.

The library itself knows the environment's keys, web identity, containers' and instances' metadata. The file stands
before the last two, as in other tools, and is read anew so that rotated keys are used.
"""

from __future__ import annotations

import configparser
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cachesvc.model.errors import InvalidRequest

FRESH_SECONDS = 60
"""Time for which credentials of the file are used before it is read again, seconds."""

Provider = Callable[[], dict[str, object]]
"""Gives ``access_key_id``, ``secret_access_key``, ``token`` and ``expires_at``."""


def file_credentials(profile: str, environment: Mapping[str, str], home: Path) -> Provider | None:
    """The shared file's provider; None where the library's own chain applies. Raises InvalidRequest for a profile that
    was named and is not there."""
    named = profile or environment.get("AWS_PROFILE", "")
    if not profile and ("AWS_ACCESS_KEY_ID" in environment or "AWS_WEB_IDENTITY_TOKEN_FILE" in environment):
        return None
    path = Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws/credentials")
    section = named or "default"
    if _read(path, section) is None:
        if not named:
            return None
        raise InvalidRequest(
            f"storage: {path} has no profile {section!r} with aws_access_key_id; add it, or name another"
        )

    def provide() -> dict[str, object]:
        found = _read(path, section)
        if found is None:
            raise OSError(f"{path} has no profile {section!r} any more")
        return {**found, "expires_at": datetime.now(UTC) + timedelta(seconds=FRESH_SECONDS)}

    return provide


def _read(path: Path, section: str) -> dict[str, object] | None:
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except (OSError, configparser.Error, UnicodeDecodeError):
        return None
    if not parser.has_option(section, "aws_access_key_id") or not parser.has_option(section, "aws_secret_access_key"):
        return None
    return {
        "access_key_id": parser.get(section, "aws_access_key_id"),
        "secret_access_key": parser.get(section, "aws_secret_access_key"),
        "token": parser.get(section, "aws_session_token", fallback=None),
    }
