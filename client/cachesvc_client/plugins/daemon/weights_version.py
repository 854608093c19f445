"""The version of an engine's weights, on which all engines of a model agree: keys are mixed with it.

An engine starts with the weights of its checkpoint, or with the version of its settings. An operator announces a
version (``cachesvc weights MODEL VERSION``), the engine loads it, and ``reset_prefix_cache`` has the engine adopt it.
Engines of one version share, and no others.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable
from typing import NamedTuple

from cachesvc.model.keys import KEY_BYTES
from cachesvc_client import CacheClientError
from cachesvc_client.plugins.daemon.errors import ConnectorRefused

log = logging.getLogger(__name__)


class Announced(NamedTuple):
    """The last announcement. ``memory``: the daemon's epoch and the model's number; in another one, the daemon has
    forgotten what was announced before. ``version``: empty without an announcement."""

    memory: tuple[int, int]
    version: str


class WeightsVersion:
    """``initial``: the setting ``weights_version``, by which weights change with announcements alone; empty: the engine
    starts with its checkpoint's weights, and each reset may mean other ones. ``seen``: the announcement at the start.
    ``announced``: asks the daemon, and may raise CacheClientError and ConnectorRefused. ``version``: empty while the
    weights have none. ``salt``: keys are mixed with it."""

    def __init__(self, initial: str, seen: Announced, announced: Callable[[], Announced]) -> None:
        self.version = initial
        self.salt = _salt_of(initial)
        self.is_shared = True
        self._changes_announced = bool(initial)
        self._seen = seen
        self._announced = announced

    def reset(self) -> None:
        """Choose the keys after a reset of the prefix cache, while the engine runs nothing.

        A new announcement is adopted. Without one, an engine with the setting keeps its version: ``sleep`` and
        ``pause_generation`` reset too. Everything else leaves the weights unknown, and the engine shares with no other:
        no setting, no answer, a daemon that forgot announcements, or one of another version before the start.
        """
        found = self._ask()
        is_known = found is not None and found == self._seen
        if found is not None and found.version and not is_known:
            self.version, self.salt, self.is_shared = found.version, _salt_of(found.version), True
            log.info("weights_adopted version=%s", found.version)
        elif is_known and self._changes_announced and self.version and self._seen.version in ("", self.version):
            log.info("weights_kept version=%s", self.version)
        else:
            self.lose("the prefix cache was reset without a newly announced version of weights")
        self._seen = found or self._seen

    def lose(self, why: str) -> None:
        """Share with no other engine: it is not known which weights this one has. ``why``: for operators."""
        self.version, self.salt, self.is_shared = "", secrets.token_bytes(KEY_BYTES), False
        log.warning(
            "not_shared why=%s: this engine shares with no other until a version of weights is announced "
            "(cachesvc weights MODEL VERSION) and it is reset",
            why,
        )

    def _ask(self) -> Announced | None:
        """Return the last announcement; None without an answer."""
        try:
            return self._announced()
        except (CacheClientError, ConnectorRefused) as error:
            log.warning("weights_unknown why=%s", error)
            return None


def _salt_of(version: str) -> bytes:
    """Return 32 bytes; none for a checkpoint's own weights."""
    digest = hashlib.blake2b(version.encode(), digest_size=KEY_BYTES, person=b"kv-vllm-weights")
    return digest.digest() if version else b""
