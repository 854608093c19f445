"""The name under which engines share: equal exactly where one engine may use what another one computed.

It contains all that decides the bytes of a page, and the keys (``identity``). It leaves out what may differ without
harm: pool sizes, batching, graphs, sampling, and the place of a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any

from cachesvc_client.plugins.daemon.errors import ConnectorRefused
from cachesvc_client.plugins.namespace.checkpoint import LoadedCheckpoints, checkpoint_digest, process_began_s
from cachesvc_client.plugins.namespace.facts import digest_of, length_fact, named

from cachesvc_vllm.daemon.vllm_objects import KvCacheConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig
from cachesvc_vllm.namespace.draft_keys import draft_lookahead
from cachesvc_vllm.namespace.identity import config_facts, environment_fact


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


def model_facts(
    vllm_config: VllmConfig,
    kv_cache_config: KvCacheConfig,
    weights: str | None,
    runtime: Runtime,
    draft_blocks: str = "lookahead",
) -> dict[str, str]:
    """Return what the name stands for. ``weights``: the operator's own word for them; ``draft_blocks``: the setting.
    Raises ConnectorRefused."""
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
