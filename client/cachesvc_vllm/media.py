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
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, wraps
from typing import Any

from cachesvc_client.plugins.facts import (
    LoadedCheckpoints,
    checkpoint_digest,
    digest_of,
    length_fact,
    named,
    process_began_s,
)
from cachesvc_client.plugins.keeper import ConnectorRefused

from cachesvc.model.words import KEY_BYTES
from cachesvc_vllm.adapters import DIGEST, content_digest
from cachesvc_vllm.identity import config_facts, environment_fact
from cachesvc_vllm.plain import draft_lookahead
from cachesvc_vllm.vllm_objects import (
    Feature,
    KvCacheConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    Request,
    VllmConfig,
)

CONTENT_HASH = re.compile(r"[0-9a-f]{64}(?:[0-9a-f]{64})?")
"""Form of vLLM's hashes: 32 bytes, or 64 with ``--mm-hasher-algorithm sha512``. A client's name of this form, and a
request with options of the processor, which vLLM hashes with the name, cannot be distinguished from content hashes."""

PREFIX = "cachesvc:"
INLINE_BYTES = 64 << 10
"""Items up to this size are digested at once, in some 50 us; larger ones by another thread."""


class Sharing(Enum):
    """Requests with media that engines share: by the digest of their ``CONTENT``; by ``NAMES`` in the form of a content
    hash, clients that give such names included; or ``NONE``."""

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
        self._reading.pop(request_id, None)

    def reset(self) -> None:
        """Use no salt again that was used before."""
        self._own = secrets.token_bytes(KEY_BYTES)

    def close(self) -> None:
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


# The name under which engines share: equal exactly where one engine may use what another one computed.
#
# It contains all that decides the bytes of a page, and the keys (``identity``). It leaves out what may differ without
# harm: pool sizes, batching, graphs, sampling, and the place of a checkpoint.


@dataclass(frozen=True)
class Runtime:
    """Facts of the running vLLM. ``hash_root``: the seed of its keys' root; ``backends``: of attention;
    ``packages``: releases of what computes; ``processor``: the kind of GPU; ``environment``: vLLM's variables."""

    release: str
    python: str
    hash_root: str
    backends: tuple[str, ...]
    packages: Mapping[str, str] = field(default_factory=dict)
    processor: str = ""
    environment: Mapping[str, object] = field(default_factory=dict)


def layer_facts(kv_cache_config: KvCacheConfig, backends: Sequence[str]) -> dict[str, str]:
    """Return facts of one rank's layers, in which stages of a pipeline differ. ``backends``: of attention."""
    groups = kv_cache_config.kv_cache_groups
    return {
        "kv_specs": repr([group.kv_cache_spec for group in groups]),
        "backends": ", ".join(backends),
        "layers": digest_of([list(group.layer_names) for group in groups]),
    }


def model_facts(
    vllm_config: VllmConfig,
    kv_cache_config: KvCacheConfig,
    weights: str | None,
    runtime: Runtime,
    draft_blocks: str = "lookahead",
    pipeline: Sequence[Mapping[str, str]] = (),
) -> dict[str, str]:
    """Return what the name stands for. ``weights``: the operator's own word for them; ``draft_blocks``: the setting;
    ``pipeline``: ``layer_facts`` of all ranks, where they are stages of one. Raises ConnectorRefused."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    lookahead = draft_lookahead(vllm_config)
    facts = {
        "weights": weights or _weights(vllm_config),
        "remote_code": str(model.trust_remote_code) if getattr(model.hf_config, "auto_map", None) else "",
        "drafter": _drafter(vllm_config),
        "draft_keys": f"{draft_blocks}.{lookahead}" if lookahead else "",
        "max_model_len": _length(model),
        "kv_specs": repr([group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]),
        "kv_layout": str(kv_cache_config.kv_cache_layout),
        "backends": ", ".join(runtime.backends),
        **{name: " | ".join(each[name] for each in pipeline) for name in next(iter(pipeline), ())},
        "parallel": _sizes(vllm_config.parallel_config),
        "hash": _hash(cache.prefix_caching_hash_algo, runtime),
        "vllm": runtime.release,
        "packages": ", ".join(f"{name} {release}" for name, release in sorted(runtime.packages.items())),
        "processor": runtime.processor,
        "environment": environment_fact(runtime.environment),
        **config_facts(vllm_config),
    }
    return {name: fact for name, fact in facts.items() if fact}


def replaced_weights(vllm_config: VllmConfig, weights: str | None) -> str:
    """Return why the facts' digests may be of other weights than this process has loaded; empty where they are not.
    Comes right after ``model_facts``, once for each engine."""
    model, speculative, load = vllm_config.model_config, vllm_config.speculative_config, vllm_config.load_config
    draft = None if speculative is None else speculative.draft_model_config
    draft_load = load if speculative is None else speculative.draft_load_config or load
    read = [] if weights or load.load_format == "dummy" else [_path(model)]
    read += [_path(draft)] if draft is not None and draft_load.load_format != "dummy" else []
    return next(filter(None, map(_loaded().replaced, dict.fromkeys(read))), "")


def look_at_loads() -> None:
    """Have vLLM's loaders of this process take a look at a checkpoint's files before they load it. Idempotent."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    load = BaseModelLoader.load_model
    if getattr(load, "looks", False):
        return

    @wraps(load)
    def look_and_load(self: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        _loaded().look(_path(model_config))
        return load(self, vllm_config, model_config, *args, **kwargs)

    look_and_load.looks = True  # type: ignore[attr-defined]
    BaseModelLoader.load_model = look_and_load


@cache
def _loaded() -> LoadedCheckpoints:
    return LoadedCheckpoints(process_began_s())


def _path(model: ModelConfig) -> str:
    return getattr(model, "model_weights", "") or model.model


def model_name(facts: Mapping[str, str]) -> str:
    """Return the identity: a digest of all facts."""
    return named("vllm", facts)


def _length(model: ModelConfig) -> str:
    return length_fact(model.hf_text_config, model.max_model_len, model.try_get_generation_config)


def _sizes(parallel: ParallelConfig) -> str:
    return (
        f"tp{parallel.tensor_parallel_size}.pp{parallel.pipeline_parallel_size}"
        f".pcp{parallel.prefill_context_parallel_size}.dcp{parallel.decode_context_parallel_size}"
    )


def _weights(vllm_config: VllmConfig) -> str:
    model = vllm_config.model_config
    if vllm_config.load_config.load_format == "dummy":
        return f"dummy, seed {model.seed}"
    return _checkpoint(model, vllm_config.load_config)


def _drafter(vllm_config: VllmConfig) -> str:
    """Return a drafter's weights and what it takes from its longest sequence; ``speculative_config`` has the rest."""
    speculative = vllm_config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    if speculative is None or draft is None:
        return ""
    length = _length(draft)
    load = speculative.draft_load_config or vllm_config.load_config
    return _drafter_weights(vllm_config.model_config, draft, load) + (f", of {length}" if length else "")


def _drafter_weights(target: ModelConfig, draft: ModelConfig, load: LoadConfig) -> str:
    if load.load_format == "dummy":
        return f"dummy, seed {draft.seed}"
    if draft.model == target.model:  # modules of the target's own checkpoint
        return "the target's"
    return _checkpoint(draft, load)


def _checkpoint(model: ModelConfig, load: LoadConfig) -> str:
    """Name of the checkpoint of a ``ModelConfig``, as a ``LoadConfig`` reads it."""
    name = _path(model)
    commit = None if getattr(model, "hf_config_path", None) else getattr(model.hf_config, "_commit_hash", None)
    try:
        return checkpoint_digest(
            name,
            model.revision,
            download_dir=getattr(load, "download_dir", None),
            commit=commit,
            has_hub=os.environ.get("VLLM_USE_MODELSCOPE", "").lower() != "true",
        )
    except OSError as error:
        raise ConnectorRefused(
            f"the weights of {name} cannot be told from others ({error}): name them, revision included, by "
            '"model" in kv_connector_extra_config'
        ) from error


def _hash(algorithm: str, runtime: Runtime) -> str:
    """vLLM's keys: their root may be PYTHONHASHSEED's, and one algorithm hashes pickles."""
    pickles = "" if algorithm.endswith("cbor") else f".python{runtime.python}"
    return f"{algorithm}{pickles}.{digest_of(runtime.hash_root)}"
