"""vLLM's configurations as far as the connector reads them, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class FullAttentionSpec:
    """Stand-in for vLLM's own, by name and by what is read of it."""

    block_size: int = 32
    num_kv_heads: int = 2
    prefix_replay_tokens: int = 0
    max_tp_shards: int | None = None


@dataclass(frozen=True)
class SlidingWindowSpec(FullAttentionSpec):
    """Stand-in for vLLM's own."""

    sliding_window: int = 64


@dataclass(frozen=True)
class MambaSpec:
    """Stand-in for vLLM's own."""

    block_size: int = 32
    mamba_cache_mode: str = "align"
    num_speculative_blocks: int = 0
    prefix_replay_tokens: int = 0
    tp_replicated: bool = False


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs:
    """Stand-in for vLLM's own."""

    kv_cache_specs: dict[str, Any]
    block_size: int = 32


@dataclass(frozen=True)
class CircularBufferSpec(FullAttentionSpec):
    """A kind that is refused."""


@dataclass
class KVCacheTensor:
    """Stand-in for vLLM's own."""

    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0
    host_resident: bool = False


@dataclass
class KVCacheConfig:
    """Stand-in for vLLM's own."""

    num_blocks: int
    kv_cache_tensors: list[KVCacheTensor]
    kv_cache_groups: list[Any] = field(default_factory=lambda: [SimpleNamespace(kv_cache_spec=FullAttentionSpec())])
    kv_cache_layout: str = "LBHNC"
    hash_block_size: int | None = None


def layers_outermost(blocks: int = 8, page_bytes: int = 512, layers: int = 3) -> KVCacheConfig:
    """A layer's pages lie together."""
    names = [f"layer.{each}" for each in range(layers)]
    tensor = KVCacheTensor(blocks * page_bytes * layers, names, blocks * page_bytes, page_bytes)
    return KVCacheConfig(blocks, [tensor])


def overlaid(*specs: Any, blocks: int = 8, page_bytes: int = 512, layers: int = 2) -> KVCacheConfig:
    """Groups that lie over each other, of a spec each; the last one has a layer less."""
    size, tensors, groups = blocks * page_bytes * layers, [], []
    for group, spec in enumerate(specs):
        names = [f"layer.{group}.{each}" for each in range(layers - (group == len(specs) - 1))]
        tensors.append(KVCacheTensor(size, names, blocks * page_bytes, page_bytes))
        groups.append(SimpleNamespace(kv_cache_spec=spec, layer_names=names))
    return KVCacheConfig(blocks, tensors, groups)


def blocks_outermost(blocks: int = 8, page_bytes: int = 512, layers: int = 3) -> KVCacheConfig:
    """All layers' pages of a block lie together."""
    names = [f"layer.{each}" for each in range(layers)]
    tensor = KVCacheTensor(blocks * page_bytes * layers, names, page_bytes, page_bytes * layers)
    return KVCacheConfig(blocks, [tensor])


class HubConfig:
    """A model's ``config.json``."""

    def __init__(self, **values: Any) -> None:
        self.values = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **values}

    def to_dict(self) -> dict[str, Any]:
        """Stand-in for transformers'."""
        return dict(self.values)


class ModelConfig(SimpleNamespace):
    """Stand-in for vLLM's own, by name."""

    def try_get_generation_config(self) -> object:
        """Defaults of sampling: the checkpoint has none."""
        return {}


class CacheConfig(SimpleNamespace):
    """Stand-in for vLLM's own, by name."""


class ParallelConfig(SimpleNamespace):
    """Stand-in for vLLM's own, by name."""


class LoRAConfig(SimpleNamespace):
    """Stand-in for vLLM's own, by name."""


class SpeculativeConfig(SimpleNamespace):
    """Stand-in for vLLM's own, by name."""


class LoadConfig(SimpleNamespace):
    """Stand-in for vLLM's own, by name."""


def vllm_config() -> Any:
    """One that is served."""
    return SimpleNamespace(
        model_config=ModelConfig(
            model="/models/tiny",
            revision=None,
            dtype="torch.bfloat16",
            quantization=None,
            seed=0,
            max_model_len=2048,
            hf_config=HubConfig(),
            hf_text_config=HubConfig(),
        ),
        load_config=LoadConfig(load_format="dummy"),
        cache_config=CacheConfig(
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256",
            cache_dtype="auto",
            calculate_kv_scales=False,
            num_gpu_blocks=8,
        ),
        parallel_config=ParallelConfig(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            nnodes_within_dp=1,
            data_parallel_rank=0,
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        kv_transfer_config=SimpleNamespace(
            engine_id="one", kv_connector="CachesvcConnector", kv_role="kv_both", kv_connector_extra_config={}
        ),
        lora_config=None,
        speculative_config=None,
    )
