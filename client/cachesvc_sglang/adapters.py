"""Digests of adapters, by which keys name them: of the tensors that SGLang holds, taken where it has loaded them.

SGLang names an adapter of ``--lora-paths`` by its name and path, and one that is loaded later by a random number.
Neither says what its files held when they were read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from cachesvc_client.plugins.facts import canonical, digest_of

DIGEST_BYTES = 32

LOADED: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""Adapters of this process by SGLang's number, for as long as SGLang keeps them. Each has its digest in ``digest``."""

MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"


def load_weights(original: Callable[..., Any], manager: Any, lora_ref: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the digest of an adapter that SGLang has read, before any request can name it."""
    LOADED.pop(lora_ref.lora_id, None)
    result = original(manager, lora_ref, *args, **kwargs)
    adapter = manager.loras[lora_ref.lora_id]
    adapter.cachesvc_digest = digest_of_adapter(adapter)
    LOADED[lora_ref.lora_id] = adapter
    return result


HOOKS = {f"{MANAGER}.{each}": load_weights for each in ("load_lora_weights", "load_lora_weights_from_tensors")}


def adapter_key(request: Any, engine: bytes) -> bytes | None:
    """Return what a request's adapter adds to its keys; None without one. An adapter whose bytes were not seen is one
    of this ``engine`` alone."""
    number = getattr(request, "lora_id", None)
    if number is None:
        return None
    adapter = LOADED.get(number)
    if adapter is not None:
        return bytes(adapter.cachesvc_digest)
    return hashlib.blake2b(engine + number.encode(), digest_size=DIGEST_BYTES, person=b"kv-sglang-own").digest()


def digest_of_adapter(adapter: Any) -> bytes:
    """Return 32 bytes that stand for the tensors of an adapter and for how they are applied."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"kv-sglang-lora")
    digest.update(digest_of(canonical({"scaling": adapter.scaling, "config": adapter.config.hf_config})).encode())
    for name, tensor in sorted(_tensors_of(adapter), key=lambda each: each[0]):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(flat.view(torch.uint8).numpy())
    return digest.digest()


def _tensors_of(adapter: Any) -> Iterator[tuple[str, Any]]:
    for number, layer in enumerate(adapter.layers):
        yield from ((f"{number}.{name}", each) for name, each in layer.weights.items())
    for kind in ("embedding_layers", "added_tokens_embeddings"):
        yield from ((f"{kind}.{name}", each) for name, each in getattr(adapter, kind).items())
