"""Two engines share exactly where everything agrees that decides bytes or keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cachesvc_client.plugins.facts import canonical, display_name
from cachesvc_client.plugins.keeper import ConnectorRefused
from cachesvc_vllm.identity import config_details
from cachesvc_vllm.media import Runtime, layer_facts, model_facts, model_name

from tests.unit.rigs.vllm_rig import (
    FullAttentionSpec,
    HubConfig,
    KVCacheConfig,
    LoRAConfig,
    SpeculativeConfig,
    layers_outermost,
    vllm_config,
)

RUNTIME = Runtime(
    release="0.32.0",
    python="3.11",
    hash_root="vllm-none-hash",
    backends=("CPU_ATTN",),
    packages={"torch": "2.13.0"},
    processor="x86_64",
    environment={"VLLM_BATCH_INVARIANT": False, "VLLM_DP_RANK": 0},
)
NGRAM = SimpleNamespace(method="ngram", use_eagle=lambda: False, draft_model_config=None)


def name(
    config: Any = None, kv: KVCacheConfig | None = None, runtime: Runtime = RUNTIME, weights: str | None = None
) -> str:
    """Name of an engine's model."""
    return model_name(model_facts(config or vllm_config(), kv or layers_outermost(), weights, runtime))


def changed(part: str, field: str, value: Any) -> Any:
    """A configuration in which one thing is another."""
    config = vllm_config()
    setattr(getattr(config, part) if part else config, field, value)
    return config


def test_the_identity_is_a_digest_alone_and_the_name_is_for_operators() -> None:
    assert name().startswith("vllm-")
    assert "tiny" not in name()
    assert display_name("/models/tiny") == "tiny"
    assert display_name("org/tiny") == "tiny"
    assert display_name("/models/ti\x1b[2J\nny") == "ti?[2J?ny"
    assert display_name("/models/" + "\u00e9" * 100) == "\u00e9" * 64


@pytest.mark.parametrize(
    "other",
    [
        lambda: name(kv=layers_outermost(blocks=1024)),
        lambda: name(changed("model_config", "model", "/elsewhere/other")),
        lambda: name(changed("model_config", "max_model_len", 4096)),
        lambda: name(changed("model_config", "hf_config", HubConfig(_name_or_path="/elsewhere"))),
        lambda: name(changed("cache_config", "num_gpu_blocks", 99)),
        lambda: name(changed("parallel_config", "data_parallel_rank", 1)),
        lambda: name(changed("kv_transfer_config", "engine_id", "two")),
        lambda: name(runtime=replace(RUNTIME, environment={**RUNTIME.environment, "VLLM_DP_RANK": 1})),
        lambda: name(runtime=replace(RUNTIME, environment={**RUNTIME.environment, "VLLM_NIXL_SIDE_CHANNEL_PORT": 1})),
    ],
)
def test_what_decides_no_byte_does_not_keep_engines_apart(other: Callable[[], str]) -> None:
    assert other() == name()


@pytest.mark.parametrize(
    "other",
    [
        lambda: name(changed("model_config", "seed", 1)),
        lambda: name(changed("model_config", "dtype", "torch.float16")),
        lambda: name(changed("model_config", "quantization", "fp8")),
        lambda: name(changed("model_config", "quantization_config", {"linear": "fp8_per_block"})),
        lambda: name(changed("model_config", "model_impl", "transformers")),
        lambda: name(changed("model_config", "an_option_of_the_next_release", True)),
        lambda: name(changed("", "a_part_of_the_next_release", SimpleNamespace(on=True))),
        lambda: name(changed("model_config", "hf_config", HubConfig(num_hidden_layers=7))),
        lambda: name(changed("cache_config", "cache_dtype", "fp8")),
        lambda: name(changed("cache_config", "prefix_caching_hash_algo", "sha256_cbor")),
        lambda: name(changed("parallel_config", "tensor_parallel_size", 2)),
        lambda: name(changed("parallel_config", "pipeline_parallel_size", 2)),
        lambda: name(changed("parallel_config", "decode_context_parallel_size", 2)),
        lambda: name(changed("device_config", "device_type", "cuda")),
        lambda: name(changed("", "speculative_config", NGRAM)),
        lambda: name(changed("", "lora_config", LoRAConfig(max_loras=1, target_modules=None))),
        lambda: name(kv=replace(layers_outermost(), kv_cache_layout="BLHNC")),
        lambda: name(
            kv=replace(layers_outermost(), kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec(16))])
        ),
        lambda: name(runtime=replace(RUNTIME, backends=("FLASH_ATTN",))),
        lambda: name(runtime=replace(RUNTIME, hash_root="17")),
        lambda: name(runtime=replace(RUNTIME, python="3.12")),
        lambda: name(runtime=replace(RUNTIME, release="0.32.1")),
        lambda: name(runtime=replace(RUNTIME, packages={"torch": "2.14.0"})),
        lambda: name(runtime=replace(RUNTIME, processor="NVIDIA H200, sm_90")),
        lambda: name(runtime=replace(RUNTIME, environment={"VLLM_BATCH_INVARIANT": True})),
        lambda: name(runtime=replace(RUNTIME, environment={**RUNTIME.environment, "VLLM_PLUGINS": "mine"})),
        lambda: name(weights="mine@2"),
    ],
)
def test_one_difference_keeps_engines_apart(other: Callable[[], str]) -> None:
    assert other() != name()


def test_stages_of_a_pipeline_have_one_name_and_another_split_has_another() -> None:
    def names(*split: Sequence[str]) -> set[str]:
        groups = [[SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=list(each))] for each in split]
        stages = [replace(layers_outermost(), kv_cache_groups=each) for each in groups]
        facts = [layer_facts(each, RUNTIME.backends) for each in stages]
        return {model_name(model_facts(vllm_config(), each, None, RUNTIME, pipeline=facts)) for each in stages}

    found = [names("ab", "c"), names("a", "bc"), {name()}]
    assert [len(each) for each in found] == [1] * 3
    assert len(set.union(*found)) == 3


@pytest.mark.parametrize(("kind", "is_apart"), [("longrope", True), ("of_the_next_release", True), ("yarn", False)])
def test_the_longest_sequence_counts_where_position_embeddings_may_look_at_it(kind: str, is_apart: bool) -> None:
    def of(length: int) -> str:
        config = changed("model_config", "max_model_len", length)
        config.model_config.hf_text_config = HubConfig(rope_parameters={"rope_type": kind, "factor": 4.0})
        return name(config)

    assert (of(1000) != of(2000)) == is_apart


def test_the_longest_sequence_counts_where_it_scales_attention() -> None:
    def of(length: int, **generation: float) -> str:
        config = changed("model_config", "max_model_len", length)
        config.model_config.hf_text_config = HubConfig(model_type="llama4_text")
        config.model_config.try_get_generation_config = lambda: generation
        return name(config)

    assert of(1000) == of(1000)
    assert of(1000) != of(100_000)
    assert of(1000) != of(1000, attn_temperature_tuning=True)


def test_a_drafter_s_longest_sequence_counts_as_its_target_s_does() -> None:
    def of(kind: str, length: int) -> str:
        config, draft = vllm_config(), vllm_config().model_config
        draft.hf_text_config = HubConfig(rope_parameters={"rope_type": kind, "factor": 4.0})
        draft.max_model_len = length
        config.speculative_config = SpeculativeConfig(
            method="draft_model", use_eagle=lambda: False, draft_model_config=draft, draft_load_config=None
        )
        return name(config)

    assert of("longrope", 1000) != of("longrope", 2000)
    assert of("yarn", 1000) == of("yarn", 2000)


def test_code_of_a_checkpoint_counts_where_it_has_some() -> None:
    def of(*, trusts: bool, **config: object) -> str:
        made = changed("model_config", "trust_remote_code", trusts)
        made.model_config.hf_config = HubConfig(**config)
        made.model_config.hf_config.auto_map = config.get("auto_map")
        return name(made)

    assert of(trusts=True) == of(trusts=False)
    code = {"AutoModelForCausalLM": "modeling_x.X"}
    assert of(trusts=True, auto_map=code) != of(trusts=False, auto_map=code)


def test_a_value_counts_however_deep_it_lies_and_may_lead_back_to_where_it_is() -> None:
    def nested(leaf: list[int]) -> dict[str, Any]:
        made: dict[str, Any] = {"leaf": leaf}
        for _ in range(12):
            made = {"inner": made}
        return made

    assert canonical(nested([128, 128])) == canonical(nested([128, 128]))
    assert canonical(nested([128, 128])) != canonical(nested([64, 64]))
    one, other = SimpleNamespace(kind=1), SimpleNamespace(kind=2)
    one.itself, other.itself = one, other
    assert canonical(one) != canonical(other)


def test_operators_see_what_is_set_and_neither_secrets_nor_what_decides_nothing() -> None:
    config = changed("model_config", "model_loader_extra_config", {"secret_access_key": "hush"})
    shown = config_details(config, {"VLLM_BATCH_INVARIANT": True, "VLLM_DP_RANK": 3, "VLLM_MLA_DISABLE": False})
    assert shown["model_config.dtype"] == "torch.bfloat16"
    assert shown["environment.VLLM_BATCH_INVARIANT"] == "true"
    assert not {"environment.VLLM_DP_RANK", "environment.VLLM_MLA_DISABLE", "model_config.model"} & set(shown)
    assert "hush" not in repr(shown)
    assert all(len(each) <= 48 for each in shown.values())


def test_how_adapters_are_computed_keeps_engines_apart_and_how_many_there_are_does_not() -> None:
    def lora(**changes: Any) -> str:
        settings = {"max_loras": 1, "max_lora_rank": 16, "target_modules": None, **changes}
        return name(changed("", "lora_config", LoRAConfig(**settings)))

    assert lora() == lora(max_loras=8)
    assert lora() != lora(target_modules=["o_proj"])


def test_what_only_pickles_depend_on_does_not_keep_others_apart() -> None:
    cbor = changed("cache_config", "prefix_caching_hash_algo", "sha256_cbor")
    assert name(cbor) == name(cbor, runtime=replace(RUNTIME, python="3.12"))


def test_weights_that_cannot_be_told_are_refused_with_what_to_do(tmp_path: Path) -> None:
    config = changed("load_config", "load_format", "auto")
    config.model_config.model = str(tmp_path)
    with pytest.raises(ConnectorRefused, match='by "model" in kv_connector_extra_config'):
        name(config)
