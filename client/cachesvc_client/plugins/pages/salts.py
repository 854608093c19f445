"""Salts of keys: of weights, adapters and whatever else a request's tokens do not say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cachesvc.model.keys import KEY_BYTES


def salted(hashes: Sequence[bytes], *salts: bytes) -> bytes:
    """Pack keys, each mixed with all ``salts`` that are not empty: other keys, as far apart as the hashes."""
    keys = b"".join(hashes)
    for each in filter(None, salts):
        keys = (np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES) ^ np.frombuffer(each, np.uint8)).tobytes()
    return keys
