"""Known callers: the tokens' file as last read. Read at the start and again whenever it changes.

Nothing of what callers send is ever logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cachesvc.ledger.leases import Process
from cachesvc.model.errors import InvalidRequest, PermissionDenied, Unauthenticated
from cachesvc.service.access.auth import Caller, Scope
from cachesvc.service.access.quota import Quota
from cachesvc.service.access.retired import Retired, Shown
from cachesvc.service.access.tokens_file import Keys, read_keys
from cachesvc.telemetry import events

LOOK_SECONDS = 1.0
REMIND_SECONDS = 60.0
MAX_TOKEN_BYTES = 4096
MIN_TOKEN_CHARACTERS = 22
"""128 bits in base64. The file has digests alone, so a short token shows only when a caller sends it."""

Signature = tuple[int, int, int]
"""Signature by which a changed file is known."""


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
        self._retired = Retired(grace_seconds, now)
        self._seen: Signature | None = None
        self._stale_since: float | None = None
        self._remind_at = 0.0
        self._why = ""
        self._watcher: asyncio.Task[None] | None = None

    def load(self) -> None:
        """Read the file. Raises InvalidRequest that says what is wrong with it, and changes nothing then."""
        seen, keys = _signature(self._path), read_keys(self._path)
        for how, old in {**self._retired.callers(), **self._keys.callers}.items():
            new = keys.callers.get(how)
            if new is not None and _is_same(old, new):
                keys.callers[how] = old  # open streams go on
                self._retired.forget(old)
            elif new is not None:
                self._retired.forget(old)
                old.revoked = True
            elif how in self._keys.callers:
                self._retired.retire(old)
        for new in keys.callers.values():
            if new.revoked:
                self._retired.revoke(new)
        self._keys, self._seen, self._stale_since = keys, seen, None

    def start(self) -> None:
        """Read the file, and begin to look for changes on the running loop. Raises InvalidRequest."""
        self.load()
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        """Stop watching the file."""
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
        events.event("tokens_read", entries=len(self._keys.callers), tenants=len(self._keys.tenants()))

    def look(self) -> None:
        """Read the file again where it has changed; say now and again that it cannot be read, while that is so. End the
        grace of tokens that were replaced."""
        self._retired.look()
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
            found = callers.get(("token", digest)) or self._retired.find(digest)
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
        """Tokens that were replaced or revoked, and that callers have shown lately."""
        return self._retired.shown()

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
        """A tenant's quota."""
        return self._keys.quotas.get(tenant, self._keys.default_quota)

    def tenants(self) -> set[str]:
        """Every tenant that the file names."""
        return self._keys.tenants()

    def working_tenants(self) -> set[str]:
        """Tenants that may hold leases and models."""
        return self._keys.working_tenants()

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
