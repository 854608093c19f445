"""Salt for the keys of requests with images, video or sound, where the content does not name them.

vLLM names an item by a hash of its content, or by what the client says (``multi_modal_uuids``, ``uuid`` in a chat): a
name that one engine has for as long as it lives, and another one may have for something else.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

from cachesvc.model.keys import KEY_BYTES
from cachesvc_vllm.daemon.vllm_objects import Feature

CONTENT_HASH = re.compile(r"[0-9a-f]{64}(?:[0-9a-f]{64})?")
"""Form of vLLM's hashes: 32 bytes, or 64 with ``--mm-hasher-algorithm sha512``. A client's name of this form, and a
request with options of the processor, which vLLM hashes with the name, cannot be distinguished from content hashes."""


class Media:
    """Media of one engine. ``is_shared``: requests whose items are named by their content share with other engines."""

    def __init__(self, *, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._own = secrets.token_bytes(KEY_BYTES)

    def salt(self, features: Sequence[Feature] | None, salt: bytes) -> bytes:
        """Salt for the keys of a request with these items, beside ``salt``: nothing more where all engines name them
        alike, else what this engine alone knows, so that its requests share among themselves."""
        if not features or (self._is_shared and all(map(_is_named_by_content, features))):
            return salt
        return bytes(ours ^ other for ours, other in zip(self._own, salt or bytes(KEY_BYTES), strict=True))


def _is_named_by_content(feature: Feature) -> bool:
    name = feature.identifier if feature.mm_hash is None else feature.mm_hash
    return CONTENT_HASH.fullmatch(name) is not None
