"""The name under which engines share: equal exactly where one engine may use what another one computed.

All that decides the bytes of a page, and the keys, is in it. What two engines may differ in without harm is not: pool
sizes, batching, graphs, sampling.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from cachesvc_vllm.checkpoint import checkpoint_digest
from cachesvc_vllm.draft_keys import draft_lookahead
from cachesvc_vllm.errors import ConnectorRefused

DIGEST_CHARACTERS = 16

LORA_CAPACITIES = ("max_loras", "max_cpu_loras", "specialize_active_lora")
"""Of vLLM's LoRA settings those that change no byte."""


@dataclass(frozen=True)
class Runtime:
    """What the running vLLM says of itself. ``hash_root``: the seed of its keys' root; ``backends``: of attention."""

    release: str
    python: str
    hash_root: str
    backends: tuple[str, ...]


def model_facts(vllm_config: Any, kv_cache_config: Any, weights: str | None, runtime: Runtime) -> dict[str, str]:
    """What the name stands for. ``weights``: the operator's own word for them. Raises ConnectorRefused."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    speculative, lora = vllm_config.speculative_config, vllm_config.lora_config
    return {
        "weights": weights or _weights(vllm_config),
        "config": _digest(model.hf_config.to_json_string()),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_dtype": str(cache.cache_dtype),
        "kv_specs": repr([group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]),
        "kv_layout": str(kv_cache_config.kv_cache_layout),
        "backends": ", ".join(runtime.backends),
        "device": str(vllm_config.device_config.device_type),
        "parallel": _sizes(parallel),
        "hash": _hash(cache.prefix_caching_hash_algo, runtime),
        "speculative": "none" if speculative is None else str(speculative.method),
        "draft_lookahead": str(draft_lookahead(vllm_config)),
        "lora": "none" if lora is None else _lora(lora),
        "vllm": ".".join(runtime.release.split(".")[:2]),
    }


def model_name(model: str, facts: Mapping[str, str]) -> str:
    """For operators the last part of the model's path, for the daemon a digest of all facts."""
    return f"{PurePath(model).name}@vllm-{_digest(json.dumps(dict(facts), sort_keys=True))}"


def _sizes(parallel: Any) -> str:
    return (
        f"tp{parallel.tensor_parallel_size}.pp{parallel.pipeline_parallel_size}"
        f".pcp{parallel.prefill_context_parallel_size}.dcp{parallel.decode_context_parallel_size}"
    )


def _lora(lora: Any) -> str:
    """How adapters are computed; which one is, requests say."""
    return ", ".join(f"{name}={value}" for name, value in sorted(vars(lora).items()) if name not in LORA_CAPACITIES)


def _weights(vllm_config: Any) -> str:
    model = vllm_config.model_config
    if vllm_config.load_config.load_format == "dummy":
        return f"dummy, seed {model.seed}"
    try:
        return checkpoint_digest(model.model, model.revision)
    except OSError as error:
        raise ConnectorRefused(
            f"the weights of {model.model} cannot be told from others ({error}): name them, revision included, by "
            '"model" in kv_connector_extra_config'
        ) from error


def _hash(algorithm: str, runtime: Runtime) -> str:
    """vLLM's keys: their root may be PYTHONHASHSEED's, and one algorithm hashes pickles."""
    pickles = "" if algorithm.endswith("cbor") else f".python{runtime.python}"
    return f"{algorithm}{pickles}.{runtime.hash_root}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=32, person=b"kv-vllm-name").hexdigest()[:DIGEST_CHARACTERS]
