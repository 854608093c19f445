"""Protocols of vLLM's objects: what the connector reads of each, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class ModelConfig(Protocol):
    """A model or a drafter, as vLLM was started with it."""

    model: str
    revision: str | None
    seed: int
    trust_remote_code: bool
    max_model_len: int
    hf_config: object
    hf_text_config: object

    def try_get_generation_config(self) -> object:
        """Defaults of sampling that the checkpoint has."""


class LoadConfig(Protocol):
    """Settings for reading weights."""

    load_format: str


class CacheConfig(Protocol):
    """Prefix caching."""

    prefix_caching_hash_algo: str


class ParallelConfig(Protocol):
    """Sizes of parallelism."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    prefill_context_parallel_size: int
    decode_context_parallel_size: int


class SpeculativeConfig(Protocol):
    """A drafter."""

    draft_model_config: ModelConfig | None
    draft_load_config: LoadConfig | None

    def use_eagle(self) -> bool:
        """True where the drafter reads the target's hidden states."""

    def uses_draft_kv_cache(self) -> bool:
        """True where the drafter has KV of its own."""


class VllmConfig(Protocol):
    """The whole configuration of an engine."""

    model_config: ModelConfig
    load_config: LoadConfig
    cache_config: CacheConfig
    parallel_config: ParallelConfig
    speculative_config: SpeculativeConfig | None
    num_prefill_lookahead_tokens: int


class KvCacheGroup(Protocol):
    """Layers that share block tables."""

    kv_cache_spec: object
    layer_names: Sequence[str]


class KvCacheConfig(Protocol):
    """Layout of an engine's KV."""

    @property
    def kv_cache_groups(self) -> Sequence[KvCacheGroup]:
        """Groups in vLLM's order."""

    @property
    def kv_cache_layout(self) -> object:
        """Order of axes of a page."""


class Feature(Protocol):
    """An image, video or sound of a request."""

    data: Any
    modality: str
    identifier: str
    mm_position: Any
    mm_hash: str | None


class LoraRequest(Protocol):
    """An adapter that a request asks for."""

    lora_name: str
    lora_path: str
    lora_int_id: int


class NamedLoraRequest(LoraRequest, Protocol):
    """An adapter as events name it."""

    name: str
    adapter_id: int


class HashedRequest(Protocol):
    """A request whose full blocks have hashes."""

    request_id: str

    @property
    def block_hashes(self) -> list[bytes]:
        """Hashes of the full blocks, in order."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Tokens of the prompt and of the output so far."""


class Request(HashedRequest, Protocol):
    """A request in vLLM's scheduler."""

    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    num_preemptions: int
    max_tokens: int
    mm_features: Sequence[Feature] | None
    prompt_embeds: object
    lora_request: NamedLoraRequest | None
    cache_salt: str | None
    kv_transfer_params: dict[str, Any] | None

    def update_block_hashes(self) -> None:
        """Hash the full blocks behind those that have a hash."""
