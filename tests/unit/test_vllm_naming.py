"""Two engines share exactly where everything agrees that decides bytes or keys."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cachesvc_vllm.checkpoint import SAMPLE_BYTES, checkpoint_digest
from cachesvc_vllm.errors import ConnectorRefused
from cachesvc_vllm.naming import Runtime, model_facts, model_name

from tests.unit.vllm_rig import FullAttentionSpec, KVCacheConfig, layers_outermost, vllm_config

RUNTIME = Runtime(release="0.32.0", python="3.11", hash_root="vllm-none-hash", backends=("CPU_ATTN",))


def name(
    config: Any = None, kv: KVCacheConfig | None = None, runtime: Runtime = RUNTIME, weights: str | None = None
) -> str:
    """Of an engine."""
    config = config or vllm_config()
    return model_name(config.model_config.model, model_facts(config, kv or layers_outermost(), weights, runtime))


def changed(part: str, field: str, value: Any) -> Any:
    """A configuration in which one thing is another."""
    config = vllm_config()
    setattr(getattr(config, part) if part else config, field, value)
    return config


def test_equal_engines_share_whatever_their_pool_is() -> None:
    assert name() == name(kv=layers_outermost(blocks=1024))
    assert name().startswith("tiny@vllm-")


@pytest.mark.parametrize(
    "other",
    [
        lambda: name(changed("model_config", "seed", 1)),
        lambda: name(changed("model_config", "dtype", "torch.float16")),
        lambda: name(changed("model_config", "quantization", "fp8")),
        lambda: name(changed("model_config", "hf_config", SimpleNamespace(to_json_string=lambda: "{}"))),
        lambda: name(changed("cache_config", "cache_dtype", "fp8")),
        lambda: name(changed("cache_config", "prefix_caching_hash_algo", "sha256_cbor")),
        lambda: name(changed("parallel_config", "tensor_parallel_size", 2)),
        lambda: name(changed("parallel_config", "pipeline_parallel_size", 2)),
        lambda: name(changed("parallel_config", "decode_context_parallel_size", 2)),
        lambda: name(changed("device_config", "device_type", "cuda")),
        lambda: name(changed("", "speculative_config", SimpleNamespace(method="ngram", use_eagle=lambda: False))),
        lambda: name(changed("", "lora_config", SimpleNamespace(max_loras=1, target_modules=None))),
        lambda: name(kv=replace(layers_outermost(), kv_cache_layout="BLHNC")),
        lambda: name(
            kv=replace(layers_outermost(), kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec(16))])
        ),
        lambda: name(runtime=replace(RUNTIME, backends=("FLASH_ATTN",))),
        lambda: name(runtime=replace(RUNTIME, hash_root="17")),
        lambda: name(runtime=replace(RUNTIME, python="3.12")),
        lambda: name(runtime=replace(RUNTIME, release="0.33.0")),
        lambda: name(weights="mine@2"),
    ],
)
def test_one_difference_keeps_engines_apart(other: Callable[[], str]) -> None:
    assert other() != name()


def test_how_adapters_are_computed_keeps_engines_apart_and_how_many_there_are_does_not() -> None:
    def lora(**changes: Any) -> str:
        settings = {"max_loras": 1, "max_lora_rank": 16, "target_modules": None, **changes}
        return name(changed("", "lora_config", SimpleNamespace(**settings)))

    assert lora() == lora(max_loras=8)
    assert lora() != lora(target_modules=["o_proj"])


def test_what_only_pickles_depend_on_does_not_keep_others_apart() -> None:
    cbor = changed("cache_config", "prefix_caching_hash_algo", "sha256_cbor")
    assert name(cbor) == name(cbor, runtime=replace(RUNTIME, python="3.12"))
    assert name(runtime=replace(RUNTIME, release="0.32.1")) == name()


def test_a_checkpoint_is_told_from_another_by_its_bytes(tmp_path: Path) -> None:
    config = changed("load_config", "load_format", "auto")
    config.model_config.model = str(tmp_path)
    with pytest.raises(ConnectorRefused, match='by "model" in kv_connector_extra_config'):
        name(config)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(os.urandom(SAMPLE_BYTES * 3))
    first = name(config)
    assert name(config) == first
    with weights.open("r+b") as file:
        file.seek(SAMPLE_BYTES + 7)
        file.write(b"\x01\x02\x03\x04")
    assert name(config) != first


def test_a_name_on_a_hub_is_its_revision() -> None:
    assert checkpoint_digest("org/model", "abc") == "org/model@abc"
    with pytest.raises(FileNotFoundError, match="no revision"):
        checkpoint_digest("org/model", None)
