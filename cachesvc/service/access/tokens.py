"""Known callers: the tokens' file as last read. Read at the start and again whenever it changes.

Nothing of what callers send is ever logged.

The tokens' file: accepted callers, their rights and quotas.

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
    revoked = true               # refused from now on; an entry that is taken out has a grace

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

A token of an engine that leaves the file is *retired*: for a grace it keeps the leases alive that its engine has, and
serves their calls. The engine's own file changes later than the daemon's, and its requests must not pay for that.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import hmac
import json
import math
import os
import re
import stat
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cachesvc.ledger.ledger import Process
from cachesvc.model.errors import InvalidRequest, PermissionDenied, Unauthenticated
from cachesvc.service.access.auth import Caller, Scope
from cachesvc.service.access.quota import NO_QUOTA, Quota, parse_quota
from cachesvc.telemetry import events

LOOK_SECONDS = 1.0
REMIND_SECONDS = 60.0
MAX_TOKEN_BYTES = 4096
MIN_TOKEN_CHARACTERS = 22
"""128 bits in base64. The file has digests alone, so a short token shows only when a caller sends it."""

MOST_REMEMBERED = 4096
"""Most tokens remembered, as many as a file may have entries; the oldest are forgotten first, and are then unknown."""
SHOWN_SECONDS = 30.0
"""Time after its last call for which a token counts as shown, seconds: engines send several heartbeats within it."""

Signature = tuple[int, int, int]
"""Signature by which a changed file is known."""


class Shown(NamedTuple):
    """A retired token that callers still show. ``left_seconds``: of its grace; 0: it is refused."""

    name: str
    tenant: str
    left_seconds: float


@dataclass(slots=True, eq=False)
class Retired:
    """A token that has left the file. ``calls``: of its caller at the last look; ``shown_at``: when it had made more.
    ``is_told``, ``is_refusal_told``: the log names it once, and once more when it is refused."""

    caller: Caller
    calls: int
    shown_at: float = -math.inf
    is_told: bool = False
    is_refusal_told: bool = False

    def look(self, now: float) -> None:
        """End its grace, and report a caller that still shows it."""
        caller = self.caller
        if caller.grace_ends is not None and now >= caller.grace_ends:
            caller.revoked = True
        if caller.calls == self.calls:
            return
        self.calls, self.shown_at = caller.calls, now
        if caller.revoked and not self.is_refusal_told:
            self.is_refusal_told = True
            events.warning("token_refused", caller=caller.name, tenant=caller.tenant or "")
        elif not caller.revoked and not self.is_told:
            self.is_told = True
            left = round((caller.grace_ends or now) - now)
            events.warning("token_retired_shown", caller=caller.name, tenant=caller.tenant or "", seconds=left)


class Keyring:
    """The current reading. ``process_of`` finds the process behind a token of the life socket; ``now``: monotonic
    seconds. ``grace_seconds``: how long an engine's token that leaves the file still serves that engine's leases.

    A file that cannot be read, or is gone, changes nothing: an operator's slip stops no engine. So it does not revoke
    anything either, and is reported until it is mended: in the log, as attention and as a metric.
    """

    def __init__(
        self,
        path: str,
        process_of: Callable[[bytes], Process | None],
        now: Callable[[], float] = time.monotonic,
        grace_seconds: float = 0.0,
    ) -> None:
        self._path = Path(path)
        self._process_of = process_of
        self._now = now
        self._keys = Keys()
        self._grace_seconds = grace_seconds
        self._retired: dict[str, Retired] = {}
        self._seen: Signature | None = None
        self._stale_since: float | None = None
        self._remind_at = 0.0
        self._why = ""
        self._watcher: asyncio.Task[None] | None = None

    def load(self) -> None:
        """Read the file. Raises InvalidRequest that says what is wrong with it, and changes nothing then."""
        seen, keys = _signature(self._path), read_keys(self._path)
        retired = {("token", digest): entry.caller for digest, entry in self._retired.items()}
        for how, old in {**retired, **self._keys.callers}.items():
            new = keys.callers.get(how)
            if new is not None:  # it says what counts
                old.grace_ends = None
                self._retired.pop(old.digest, None)
                if _is_same(old, new):
                    keys.callers[how] = old  # open streams go on
                else:
                    old.revoked = True
            elif how in self._keys.callers:
                self._retire(old)
        for new in keys.callers.values():
            if new.revoked:
                self._remember(new)
        self._keys, self._seen, self._stale_since = keys, seen, None

    def start(self) -> None:
        """Read the file, and begin to look for changes on the running loop. Raises InvalidRequest."""
        self.load()
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    def reload(self) -> None:
        """Read the file again, now; one that cannot be read changes nothing but the log (SIGHUP)."""
        try:
            self.load()
        except InvalidRequest as error:
            self._remind_at = 0.0
            self._tell_stale(str(error))
            return
        events.event("tokens_read", entries=len(self._keys.callers), tenants=len(self.tenants()))

    def look(self) -> None:
        """Read the file again where it has changed; say now and again that it cannot be read, while that is so. End the
        grace of tokens that were replaced."""
        for entry in self._retired.values():
            entry.look(self._now())
        try:
            seen = _signature(self._path)
        except InvalidRequest as error:
            if self._seen is None:
                self._tell_stale(str(error))
            self._seen = None  # it may be on its way, as when it is replaced: told of with the next look
            return
        if seen != self._seen:
            self._seen = seen
            self.reload()
        elif self._stale_since is not None:
            self._tell_stale(self._why)

    def _tell_stale(self, why: str) -> None:
        now, self._why = self._now(), why
        if self._stale_since is None:
            self._stale_since, self._remind_at = now, 0.0
        if now >= self._remind_at:
            self._remind_at = now + REMIND_SECONDS
            events.warning("tokens_not_read", reason=why, seconds=round(self.stale_seconds))

    @property
    def stale_seconds(self) -> float:
        """Time for which the file has not been readable, so that what was in it before holds; 0 while it is read."""
        return 0.0 if self._stale_since is None else max(self._now() - self._stale_since, 0.001)

    def find(self, token: str, process: bytes, names: Iterable[str]) -> Caller | None:
        """The caller behind a token, a certificate or a local process, in that order; None for nothing of the kind.

        Raises Unauthenticated for a token that is not known, or no more: it does not fall back to something weaker.
        """
        callers = self._keys.callers
        if token:
            if len(token) < MIN_TOKEN_CHARACTERS:
                raise Unauthenticated(
                    f"a token has at least {MIN_TOKEN_CHARACTERS} characters, drawn by chance: make one by `openssl "
                    "rand -base64 32`, and put its digest into the tokens' file"
                )
            digest = hashlib.sha256(token[:MAX_TOKEN_BYTES].encode(errors="replace")).hexdigest()
            entry = self._retired.get(digest)
            found = callers.get(("token", digest)) or (None if entry is None else entry.caller)
            # The look-up compares digests, which a caller cannot steer; this one leaves no doubt.
            if found is None or not hmac.compare_digest(found.digest, digest):
                raise Unauthenticated("the token is not known to this daemon; ask its operator for one")
            found.check()
            return found
        for name in names:
            if (found := callers.get(("certificate", name))) is not None:
                return found
        known = self._process_of(process) if process else None
        return None if known is None else _peer(callers, known)

    def retired_shown(self) -> list[Shown]:
        """Tokens that were replaced or revoked, and that callers have shown lately; the one whose grace ends first at
        the head."""
        now = self._now()
        found = []
        for entry in self._retired.values():
            who = entry.caller
            if now - entry.shown_at <= SHOWN_SECONDS:
                left = 0.0 if who.revoked or who.grace_ends is None else max(who.grace_ends - now, 0.0)
                found.append(Shown(who.name, who.tenant or "", left))
        return sorted(found, key=lambda each: each.left_seconds)

    def admit_scraper(self, token: str) -> None:
        """Admit a scraper with this token to the page of metrics. Safe to call from another thread.

        The page goes over plain HTTP, so what opens it must open nothing else. Raises Unauthenticated,
        PermissionDenied.
        """
        found = self.find(token, b"", ())
        if found is None:
            raise Unauthenticated(
                "the page needs a token of scope metrics, as 'Authorization: Bearer TOKEN' (Prometheus: "
                "authorization.credentials_file)"
            )
        found.check()
        if Scope.METRICS not in found.scopes:
            raise PermissionDenied(
                f"{found.name!r} may not read metrics: that takes a token of scope metrics alone. Replace this one: it "
                "has come over plain HTTP"
            )

    def quota_of(self, tenant: str) -> Quota:
        return self._keys.quotas.get(tenant, self._keys.default_quota)

    def tenants(self) -> set[str]:
        """Every tenant that the file names; the empty name is the shared one."""
        return {each.acts_for for each in self._keys.callers.values() if not each.revoked} | set(self._keys.quotas)

    def working_tenants(self) -> set[str]:
        """Tenants that may hold leases and models."""
        engines = (each for each in self._keys.callers.values() if Scope.ENGINE in each.scopes)
        return {each.acts_for for each in engines if not each.revoked}

    def _retire(self, caller: Caller) -> None:
        """The file has its entry no more: an engine's token has its grace, any other is refused from now on."""
        is_of_engine = bool(caller.digest) and Scope.ENGINE in caller.scopes
        if is_of_engine and self._grace_seconds and not caller.revoked:
            caller.grace_ends = self._now() + self._grace_seconds
            events.event(
                "token_retired", caller=caller.name, tenant=caller.tenant or "", seconds=round(self._grace_seconds)
            )
        else:
            caller.revoked = True
        self._remember(caller)

    def _remember(self, caller: Caller) -> None:
        if not caller.digest:
            return
        before = self._retired.pop(caller.digest, None)
        entry = self._retired[caller.digest] = Retired(caller, caller.calls)
        if before is not None:
            entry.is_refusal_told = before.is_refusal_told
        while len(self._retired) > MOST_REMEMBERED:
            oldest = self._retired.pop(next(iter(self._retired)))
            oldest.caller.revoked = True

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                self.look()
            except Exception:  # noqa: BLE001 - the root of a task: without it no token would be revoked again
                events.failure("tokens_watch_broke")


def _peer(callers: dict[tuple[str, Any], Caller], process: Process) -> Caller | None:
    found = callers.get(("uid", process.uid))
    if found is not None:
        return found
    return next((callers["gid", gid] for gid in sorted(process.gids) if ("gid", gid) in callers), None)


def _signature(path: Path) -> Signature:
    try:
        status = path.stat()
    except OSError as error:
        raise InvalidRequest(f"cannot read the tokens' file {path}: {error.strerror}") from error
    return status.st_mtime_ns, status.st_ino, status.st_size


def _is_same(old: Caller, new: Caller) -> bool:
    same = (old.name, old.scopes, old.tenant, old.expires) == (new.name, new.scopes, new.tenant, new.expires)
    return same and not old.revoked and not new.revoked


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
