"""Key of a prompt's last block where it is not full: a prefilling engine seals it, and a decoding one copies it.

    key of the tail = H("kv-tail", key of the block before, tokens of a block, the tail's tokens, what else vLLM hashes)

No full block has such a key, nor a tail of other tokens or another length. An adapter, an image or a salt is in it as
in the keys of full blocks: by vLLM's extra keys, and by the salts that all keys of a request are mixed with.
"""

from __future__ import annotations

from collections.abc import Sequence

from cachesvc_client.core.keys import tail_digest
from cachesvc_client.plugins.pages.wish import Tail

from cachesvc.model.keys import KEY_BYTES
from cachesvc_vllm.daemon.vllm_objects import Request

LEAST_TOKENS = 2
"""Tokens of a tail that is of use: the last token of a prompt is computed always."""


def tail_of(request: Request, keys: Sequence[bytes], block_tokens: int) -> Tail | None:
    """Return the tail of a request's prompt, ``keys`` being those of its full blocks; None where it has none, or one
    that is of no use."""
    end = request.num_prompt_tokens
    first = end - end % block_tokens
    if end - first < LEAST_TOKENS:
        return None
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    extra, _ = generate_block_hash_extra_keys(request, first, end, 0)
    parent = keys[first // block_tokens - 1] if first else bytes(KEY_BYTES)
    tokens = request.all_token_ids[first:end]
    return Tail(tail_digest(parent, block_tokens, tokens, repr(extra).encode()), end - first)
