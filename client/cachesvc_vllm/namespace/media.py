"""Keys of requests with images, video or sound: by what the engine computes with, not by what items are called.

vLLM names an item by a hash of its content, or by what the client says (``multi_modal_uuids``, ``uuid`` in a chat), and
a request does not say which of the two it is. A client may give any name, that of another image too. So the connector
digests the processed tensors of each item, which the engine has, and has vLLM call the item by that digest before it is
first scheduled. The name is in vLLM's hashes of the blocks with the item, and it is the one under which vLLM keeps what
the encoder made of it. It contains what else that depends on: the version of the weights, and the adapter where towers
have one. So neither outlives what it was made from.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from enum import Enum
from typing import Any

from cachesvc.model.keys import KEY_BYTES
from cachesvc_vllm.daemon.vllm_objects import Feature, Request
from cachesvc_vllm.namespace.adapters import DIGEST, content_digest

CONTENT_HASH = re.compile(r"[0-9a-f]{64}(?:[0-9a-f]{64})?")
"""Form of vLLM's hashes: 32 bytes, or 64 with ``--mm-hasher-algorithm sha512``. A client's name of this form, and a
request with options of the processor, which vLLM hashes with the name, cannot be distinguished from content hashes."""

PREFIX = "cachesvc:"
INLINE_BYTES = 64 << 10
"""Items up to this size are digested at once, in some 50 us; larger ones by another thread."""


class Sharing(Enum):
    """Requests with media that engines share: by the digest of their ``CONTENT``; by ``NAMES`` in the form of a content
    hash, from any client; or ``NONE``."""

    CONTENT = None
    NAMES = True
    NONE = False


class Media:
    """Media of one engine. ``weights_salt``: gives the salt of the weights. ``in_towers``: adapters change what the
    encoder makes of an item. ``renamed``: called with the id of a request whose hashes are new. Used from vLLM's
    scheduler thread, which digests nothing large: another thread does."""

    def __init__(
        self,
        sharing: Sharing,
        weights_salt: Callable[[], bytes] = bytes,
        renamed: Callable[[str], None] = lambda _: None,
        *,
        in_towers: bool = False,
    ) -> None:
        self._sharing = sharing
        self._weights_salt = weights_salt
        self._renamed = renamed
        self._in_towers = in_towers
        self._own = secrets.token_bytes(KEY_BYTES)
        self._reading: dict[str, Future[None]] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="cachesvc-vllm-media")

    def salt(self, request: Request, salt: bytes) -> bytes | None:
        """Salt for the keys of a request beside ``salt``, which is its adapter's: the same where all engines name its
        items alike, else mixed with what this engine alone knows, so that its requests share among themselves. None
        while its items are digested."""
        features = request.mm_features
        if not features:
            return salt
        if self._sharing is Sharing.NAMES and all(map(_is_named_as_content, features)):
            return salt
        if self._sharing is not Sharing.CONTENT or not all(map(_is_readable, features)):
            return self._mixed(salt)
        if not self._are_read(request.request_id, features):
            return None
        return salt if self._name(request, salt) else self._mixed(salt)

    def agrees(self, request: Request, adapter_salt: bytes, salt: bytes) -> bool:
        """True where ``salt`` is what ``salt()`` made, or may make, of the adapter's."""
        return salt in (adapter_salt, self._mixed(adapter_salt) if request.mm_features else adapter_salt)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._reading.pop(request_id, None)

    def reset(self) -> None:
        """Use no salt again that was used before."""
        self._own = secrets.token_bytes(KEY_BYTES)

    def close(self) -> None:
        """Have the thread end. Idempotent."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _mixed(self, salt: bytes) -> bytes:
        return bytes(ours ^ other for ours, other in zip(self._own, salt or bytes(KEY_BYTES), strict=True))

    def _are_read(self, request_id: str, features: Sequence[Feature]) -> bool:
        """True once each item has its digest; else the other thread is at it."""
        new = [each.data for each in features if not hasattr(each.data, DIGEST)]
        if not new:
            self._reading.pop(request_id, None)
            return True
        if sum(map(_size_bytes, new)) <= INLINE_BYTES:
            _digest(new)
            return True
        if (reading := self._reading.get(request_id)) is None:
            self._reading[request_id] = self._reader.submit(_digest, new)
        elif reading.done():
            reading.result()
        return False

    def _name(self, request: Request, adapter_salt: bytes) -> bool:
        """Have vLLM call a request's items by what they are; False where it has used other names of them already."""
        assert request.mm_features is not None
        salts = self._weights_salt() + (adapter_salt if self._in_towers else b"")
        names = [_name_of(each, salts) for each in request.mm_features]
        if [each.identifier for each in request.mm_features] == names:
            return True
        if request.num_computed_tokens or request.num_preemptions:
            return False
        features = [copy(each) for each in request.mm_features]
        for feature, name in zip(features, names, strict=True):
            feature.identifier = name
        request.mm_features = features
        request.block_hashes.clear()
        request.update_block_hashes()
        self._renamed(request.request_id)
        return True


def _name_of(feature: Feature, salts: bytes) -> str:
    """Name of an item with a digest: of its content, its length in tokens, and which of these it fills."""
    place = feature.mm_position
    mask = None if place.is_embed is None else place.is_embed.tolist()
    said = repr((feature.modality, place.length, mask)).encode()
    digest = hashlib.blake2b(getattr(feature.data, DIGEST), digest_size=32, person=b"kv-vllm-media")
    digest.update(len(salts).to_bytes(4, "little") + salts + said)
    return PREFIX + digest.hexdigest()


def _digest(items: Sequence[Any]) -> None:
    """Digest processed items, each of which keeps its digest."""
    for each in items:
        setattr(each, DIGEST, content_digest({key: each[key].data for key in each}, b"kv-vllm-item"))


def _is_readable(feature: Feature) -> bool:
    """True where the engine has all of an item as tensors in its processor's memory: not where the workers alone have
    it, nor where it is a handle (``--mm-processor-cache-type shm``)."""
    item = feature.data
    if item is None or "monotonic_id" in item:
        return False
    if hasattr(item, DIGEST):
        return True
    leaves = [leaf for key in item for leaf in _leaves(item[key].data)]
    return any(map(_is_tensor, leaves)) and all(
        leaf.device.type == "cpu" if _is_tensor(leaf) else isinstance(leaf, bool | int | float | str) for leaf in leaves
    )


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in _leaves(each)]
    return [value]


def _is_tensor(value: object) -> bool:
    return hasattr(value, "untyped_storage")


def _size_bytes(item: Any) -> int:
    leaves = (leaf for key in item for leaf in _leaves(item[key].data))
    return sum(leaf.nbytes for leaf in leaves if _is_tensor(leaf))


def _is_named_as_content(feature: Feature) -> bool:
    name = feature.identifier if feature.mm_hash is None else feature.mm_hash
    return CONTENT_HASH.fullmatch(name) is not None
