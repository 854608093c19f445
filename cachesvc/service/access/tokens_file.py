"""The tokens' file: accepted callers, their rights and quotas.

It holds SHA-256 digests, never tokens: a reader learns none that is long enough. TOML, or JSON of the same
shape where the name ends in ``.json``::

    [[token]]                    # metadata "authorization: Bearer TOKEN"
    name = "engines of team a"
    sha256 = "..."               # printf %s "$TOKEN" | sha256sum
    scopes = ["engine"]          # engine, read-only, admin; or metrics alone
    tenant = "team-a"
    expires = 2027-01-01T00:00:00Z

    [[token]]
    name = "stolen"
    sha256 = "..."
    revoked = true               # refused from now on; an entry that is taken out has a grace (``retired.py``)

    [[peer]]                     # a process of this node, by what the kernel says at the life socket
    uid = 1001                   # or gid
    scopes = ["engine"]
    tenant = "team-b"

    [[certificate]]              # a client certificate that --tls-client-ca vouches for
    name = "router.example.org"  # a DNS name or a URI that it carries; its common name where it carries none
    scopes = ["read-only"]       # which it has where nothing is said

    [quota.default]              # for every tenant without its own
    leases = 16
    [quota.tenants.team-a]
    device_bytes = "32GiB"
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cachesvc.model.errors import InvalidRequest
from cachesvc.service.access.auth import Caller, Scope
from cachesvc.service.access.quota import NO_QUOTA, Quota, parse_quota

MAX_ENTRIES = 4096
MAX_FILE_BYTES = 4 << 20
MAX_TENANT_BYTES = 64
_FIELDS = {
    "token": {"name", "sha256", "scopes", "tenant", "expires", "revoked"},
    "peer": {"name", "uid", "gid", "scopes", "tenant", "expires"},
    "certificate": {"name", "scopes", "tenant", "expires"},
}


_UNSAID = {"certificate": [Scope.READ.value]}
"""Scopes where an entry has none: a certificate may have been signed for something else."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Contents of the file as read. ``callers`` by what they prove: (kind, digest, uid, gid or name)."""

    callers: dict[tuple[str, Any], Caller] = field(default_factory=dict)
    quotas: dict[str, Quota] = field(default_factory=dict)
    default_quota: Quota = NO_QUOTA

    def tenants(self) -> set[str]:
        """Every tenant that the file names; the empty name is the shared one."""
        return {each.acts_for for each in self.callers.values() if not each.revoked} | set(self.quotas)

    def working_tenants(self) -> set[str]:
        """Tenants that may hold leases and models."""
        return {each.acts_for for each in self.callers.values() if Scope.ENGINE in each.scopes and not each.revoked}


def read_keys(path: Path) -> Keys:
    """Read and check a tokens' file. Raises InvalidRequest, whatever is wrong with it."""
    try:
        return _read_keys(path)
    except (ValueError, RecursionError) as error:  # of decoders and of texts that are none; they quote a position
        raise InvalidRequest(f"{path} cannot be read: {error}") from error


def _read_keys(path: Path) -> Keys:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"cannot read the tokens' file {path}: {error.strerror}") from error
    if status.st_uid not in (0, os.geteuid()):
        raise InvalidRequest(f"{path} belongs to user {status.st_uid}; chown it to root or to the daemon's user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidRequest(f"{path} can be written by others than its owner; chmod go-w it")
    if len(raw) > MAX_FILE_BYTES:
        raise InvalidRequest(f"{path} has more than {MAX_FILE_BYTES} bytes")
    text = raw.decode()
    if path.suffix == ".json":
        table = json.loads(text)
        json.dumps(table, ensure_ascii=False).encode()  # it can hold halves of letters, which no answer can
    else:
        table = tomllib.loads(text)
    if not isinstance(table, dict) or not set(table) <= {*_FIELDS, "quota"}:
        raise InvalidRequest(f"{path}: known tables are token, peer, certificate and quota")
    keys = Keys(dict(_callers(path, table)), *_quotas(path, table.get("quota", {})))
    if len(keys.callers) > MAX_ENTRIES:
        raise InvalidRequest(f"{path}: more than {MAX_ENTRIES} entries")
    return keys


def _callers(path: Path, table: dict[str, Any]) -> Iterator[tuple[tuple[str, Any], Caller]]:
    seen: set[tuple[str, Any]] = set()
    for kind, known in _FIELDS.items():
        entries = table.get(kind, [])
        if not isinstance(entries, list):
            raise InvalidRequest(f"{path}: {kind} is a list of tables: [[{kind}]]")
        for number, entry in enumerate(entries, start=1):
            where = f"{path}: {kind} {number}"
            if not isinstance(entry, dict) or not set(entry) <= known:
                raise InvalidRequest(f"{where}: known keys are {', '.join(sorted(known))}")
            how = _proof(where, kind, entry)
            if how in seen:
                raise InvalidRequest(f"{where}: the same {how[0]} is there twice")
            seen.add(how)
            yield how, _caller(where, entry, how)


def _proof(where: str, kind: str, entry: dict[str, Any]) -> tuple[str, Any]:
    if kind == "token":
        digest = entry.get("sha256")
        if not isinstance(digest, str) or re.fullmatch("[0-9a-f]{64}", digest) is None:
            raise InvalidRequest(f"{where}: sha256 must be 64 hexadecimal digits in lower case")
        return "token", digest
    if kind == "certificate":
        if not isinstance(entry.get("name"), str) or not entry["name"]:
            raise InvalidRequest(f"{where}: name is a DNS name, a URI or else the common name of the certificate")
        return "certificate", entry["name"]
    given = [name for name in ("uid", "gid") if name in entry]
    number = entry.get(given[0]) if len(given) == 1 else None
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise InvalidRequest(f"{where}: needs a uid or a gid, as a number")
    return given[0], number


def _caller(where: str, entry: dict[str, Any], how: tuple[str, Any]) -> Caller:
    tenant = entry.get("tenant")
    revoked = entry.get("revoked", False)
    if not isinstance(revoked, bool):
        raise InvalidRequest(f"{where}: revoked is true or false, got {revoked!r}")
    if revoked:
        entry = {"scopes": [Scope.ENGINE.value], **entry}  # what it was good for may be left out
    scopes = entry.get("scopes", _UNSAID.get(how[0]))
    known = {scope.value for scope in Scope}
    if not isinstance(scopes, list) or not scopes or not all(isinstance(s, str) and s in known for s in scopes):
        raise InvalidRequest(f"{where}: scopes are a list of {', '.join(sorted(known))}, got {scopes!r:.80}")
    if tenant is not None and (not isinstance(tenant, str) or not 0 < len(tenant.encode()) <= MAX_TENANT_BYTES):
        raise InvalidRequest(f"{where}: tenant is a name of 1 to {MAX_TENANT_BYTES} bytes")
    held = frozenset(Scope(scope) for scope in scopes)
    if Scope.METRICS in held and (len(held) > 1 or tenant is not None or how[0] != "token"):
        raise InvalidRequest(
            f"{where}: scope metrics is for a token of its own, without another scope and a tenant: it goes over plain "
            "HTTP, and the page shows all tenants"
        )
    if tenant is None and Scope.ENGINE in held:
        tenant = ""  # an engine of the shared tenant sees no other
    digest = how[1] if how[0] == "token" else ""
    name = entry.get("name", f"{how[0]} {how[1]}")
    if not isinstance(name, str) or not 0 < len(name) <= 128:
        raise InvalidRequest(f"{where}: name is a text of 1 to 128 letters")
    return Caller(name, held, tenant, _expiry(where, entry.get("expires")), revoked, digest)


def _expiry(where: str, value: Any) -> float:
    if value is None:
        return math.inf
    try:
        when = datetime.datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        when = None
    if not isinstance(when, datetime.datetime) or when.tzinfo is None:
        raise InvalidRequest(f"{where}: expires is a time with its zone, e.g. 2027-01-01T00:00:00Z")
    return when.timestamp()


def _quotas(path: Path, table: Any) -> tuple[dict[str, Quota], Quota]:
    if not isinstance(table, dict) or not set(table) <= {"default", "tenants"}:
        raise InvalidRequest(f"{path}: quota has the tables default and tenants")
    tenants = table.get("tenants", {})
    if not isinstance(tenants, dict):
        raise InvalidRequest(f"{path}: quota.tenants has a table for each tenant")
    named = {name: parse_quota(each, f"{path}: quota.tenants.{name}") for name, each in tenants.items()}
    default = parse_quota(table["default"], f"{path}: quota.default") if "default" in table else NO_QUOTA
    return named, default
