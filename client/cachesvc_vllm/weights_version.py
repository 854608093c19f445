"""Which weights an engine computes with, as far as other engines can know it: a version that all of them agree on.

An engine starts with the weights of its checkpoint, or with the version of its settings. ``reset_prefix_cache`` says
that it has loaded others: those that an operator announced last (``cachesvc weights MODEL VERSION``). Keys are mixed
with the version, so engines of one version share and others do not.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable

from cachesvc_client import CacheClientError

from cachesvc.model.keys import KEY_BYTES

log = logging.getLogger(__name__)


class WeightsVersion:
    """``initial``: the version that the engine starts with; empty: its checkpoint's weights. ``seen``: what was
    announced before. ``announced``: asks the daemon, and may raise CacheClientError. ``salt``: keys are mixed with it.
    """

    def __init__(self, initial: str, seen: str, announced: Callable[[], str]) -> None:
        self.version = initial
        self._seen = initial or seen
        self.salt = _salt_of(initial)
        self.is_shared = True
        self._is_versioned = bool(initial)
        self._announced = announced

    def reset(self) -> None:
        """The engine has loaded weights, and runs nothing.

        What was announced since the last reset is what it has loaded. Else, where versions are in use, nothing was
        loaded: it keeps its version (``sleep`` and ``pause_generation`` reset too). Else its weights are unknown: it
        shares with no other engine until a version is announced and it is reset again.
        """
        found = self._ask()
        if found and found != self._seen:
            self.version = self._seen = found
            self.salt, self.is_shared, self._is_versioned = _salt_of(found), True, True
            log.info("weights_adopted version=%s", found)
        elif found is not None and self._is_versioned and self.is_shared:
            log.info("weights_kept version=%s", self.version)
        else:
            self.version, self.salt, self.is_shared = "", secrets.token_bytes(KEY_BYTES), False
            log.warning(
                "not_shared why=the prefix cache was reset without a new version of weights: this engine shares with "
                "no other until one is announced (cachesvc weights MODEL VERSION) and it is reset again"
            )

    def _ask(self) -> str | None:
        """What was announced last; None where the daemon does not say."""
        try:
            return self._announced()
        except CacheClientError as error:
            log.warning("weights_unknown why=%s", error)
            return None


def _salt_of(version: str) -> bytes:
    """32 bytes; none for a checkpoint's own weights."""
    digest = hashlib.blake2b(version.encode(), digest_size=KEY_BYTES, person=b"kv-vllm-weights")
    return digest.digest() if version else b""
