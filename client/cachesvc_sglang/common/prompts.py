"""Keys of requests: chained over tokens, and over what else their KV depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from cachesvc_client.core.keys import BlockHasher, ExtraKey

DIGEST_BYTES = 32


class PromptKeys:
    """Keys of one request, which grow with its tokens. ``namespace``: of the registration. ``extra_key``: its client's.
    ``adapter``: digest of its LoRA adapter. ``hashes``: of the full blocks."""

    def __init__(
        self,
        namespace: bytes,
        block_tokens: int,
        extra_key: str | None,
        cache_salt: str | None,
        adapter: bytes | None = None,
    ) -> None:
        named = {"sglang.extra": extra_key, "sglang.salt": cache_salt}
        extras = tuple(ExtraKey.of_prompt(kind, _digest(text)) for kind, text in named.items() if text)
        if adapter is not None:
            extras = (*extras, ExtraKey.of_prompt("sglang.adapter", adapter))
        self._hasher = BlockHasher(namespace, block_tokens, extras)
        self._tokens = 0
        self.hashes: list[bytes] = []

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """Hash what is new of the request's ``tokens``, which never lose any; the keys of all full blocks."""
        if len(tokens) > self._tokens:
            blocks = self._hasher.extend(tokens[self._tokens :])
            self._tokens = len(tokens)
            self.hashes += map(self._hasher.key, range(len(self.hashes), blocks))
        return self.hashes


def may_share(request: Any) -> bool:
    """Return whether a request's tokens say what its KV depends on. Images stand in its tokens by a short hash, and
    embeddings do not at all."""
    return (
        request.multimodal_inputs is None
        and request.input_embeds is None
        and request.positional_embed_overrides is None
        and not request.skip_radix_cache_insert
    )


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES, person=b"kv-sglang-extra").digest()
