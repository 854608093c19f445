"""Configurations that the connector cannot serve are refused in words, before anything is allocated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cachesvc_client.plugins.keeper import ConnectorRefused
from cachesvc_vllm.cache_groups import CacheGroup, Retention, cache_groups
from cachesvc_vllm.refusals import POOL_FIELDS, require_known_pool, require_supported, serve_producer

from tests.unit.rigs.vllm_rig import (
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    layers_outermost,
    overlaid,
    vllm_config,
)


class Pool:
    """vLLM's block pool, as far as a look at its members goes."""

    def __init__(self, **more: object) -> None:
        vars(self).update(dict.fromkeys(POOL_FIELDS), **more)

    def touch(self) -> None:
        """One of the known ones."""


class LaterPool(Pool):
    """A later release's pool, with members that were not looked at."""

    def adopt_blocks(self) -> None:
        """A new one."""

    @property
    def epoch(self) -> int:
        """Another."""
        return 0

    @staticmethod
    def _split() -> None:
        """A private one."""


def test_a_block_pool_as_it_was_published_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    require_known_pool(Pool(), allow_any=False)
    assert not caplog.records


def test_a_block_pool_with_more_is_refused_or_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    later = LaterPool(num_lanes=1, _owner=2)
    words = (
        "the fields _owner, num_lanes and the methods _split, adopt_blocks, epoch, which cachesvc_vllm was not made for"
    )
    with pytest.raises(ConnectorRefused, match=rf"^vLLM's block pool has {words}: .*allow_untested_vllm"):
        require_known_pool(later, allow_any=False)
    with pytest.raises(ConnectorRefused, match=r"has the fields num_lanes, which"):
        require_known_pool(Pool(num_lanes=1), allow_any=False)
    require_known_pool(later, allow_any=True)
    assert caplog.messages == [f"block_pool_unknown vLLM's block pool has {words}"]


def test_a_plain_engine_is_served() -> None:
    require_supported(vllm_config(), layers_outermost())


@pytest.mark.parametrize(
    ("part", "name", "value", "words"),
    [
        ("parallel_config", "decode_context_parallel_size", 2, "decode_context_parallel_size is 2, and only 1"),
        ("parallel_config", "prefill_context_parallel_size", 2, "prefill_context_parallel_size is 2"),
        ("parallel_config", "nnodes_within_dp", 2, "on 2 nodes is not supported"),
        ("cache_config", "enable_prefix_caching", False, "prefix caching is off"),
        ("cache_config", "prefix_caching_hash_algo", "xxhash", "xxhash is not collision-free.*take one of sha256"),
        ("cache_config", "prefix_caching_hash_algo", "xxhash_cbor", "xxhash_cbor"),
        ("cache_config", "calculate_kv_scales", True, "--calculate-kv-scales"),
    ],
)
def test_a_configuration_is_refused_with_what_works(part: str, name: str, value: Any, words: str) -> None:
    config = vllm_config()
    setattr(getattr(config, part) if part else config, name, value)
    with pytest.raises(ConnectorRefused, match=words):
        require_supported(config, layers_outermost())


def test_a_drafter_whose_kv_no_key_covers_is_refused() -> None:
    config = vllm_config()
    config.speculative_config = SimpleNamespace(method="extract_hidden_states")
    with pytest.raises(
        ConnectorRefused, match=r"by extract_hidden_states is not supported: take one of ngram.* eagle3"
    ):
        require_supported(config, layers_outermost())


def test_ngram_speculation_tensor_parallelism_and_adapters_are_served() -> None:
    config = vllm_config()
    config.speculative_config = SimpleNamespace(method="ngram")
    config.parallel_config.tensor_parallel_size = 4
    config.lora_config = SimpleNamespace()
    require_supported(config, layers_outermost())


def test_pipelines_are_served_by_vllm_s_own_processes_and_without_drafts() -> None:
    config = vllm_config()
    parallel = config.parallel_config
    parallel.pipeline_parallel_size, parallel.distributed_executor_backend = 2, "mp"
    require_supported(config, layers_outermost())
    parallel.distributed_executor_backend = "ray"
    with pytest.raises(ConnectorRefused, match="--distributed-executor-backend ray is not supported: take mp"):
        require_supported(config, layers_outermost())
    parallel.distributed_executor_backend = "mp"
    config.speculative_config = SimpleNamespace(method="ngram")
    with pytest.raises(ConnectorRefused, match="with pipeline_parallel_size above 1 is not supported: leave out"):
        require_supported(config, layers_outermost())


def test_groups_of_windows_and_states_are_served_beside_whole_sequences() -> None:
    config = overlaid(SlidingWindowSpec(), MambaSpec(num_speculative_blocks=2), FullAttentionSpec())
    config.num_blocks = 256
    require_supported(vllm_config(), config)
    assert cache_groups(config) == (
        CacheGroup(Retention.WINDOW, 32, 64),
        CacheGroup(Retention.STATE, 32),
        CacheGroup(Retention.FULL, 32),
    )


def test_a_pool_in_which_the_longest_request_could_not_move_its_drafts_states_is_refused() -> None:
    config, engine = overlaid(MambaSpec(num_speculative_blocks=2), FullAttentionSpec()), vllm_config()
    fits = 1 + (2 + 2 * 2) + (4096 // 32 + 2)
    engine.model_config.max_model_len = 4096
    config.num_blocks = fits
    require_supported(engine, config)
    config.num_blocks = fits - 1
    with pytest.raises(ConnectorRefused, match=rf"--max-model-len takes {fits} blocks .* there are {fits - 1}: give"):
        require_supported(engine, config)


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([FullAttentionSpec()] * 129, "129 KV cache groups, and 128 are supported"),
        ([FullAttentionSpec(), CircularBufferSpec()], "groups of CircularBufferSpec are not supported; Full"),
        ([FullAttentionSpec(), MambaSpec(mamba_cache_mode="all")], "--mamba-cache-mode all cannot be shared"),
        (
            [FullAttentionSpec(block_size=64), MambaSpec()],
            r"blocks of \[32, 64\], and vLLM keeps states within a block",
        ),
        ([FullAttentionSpec(block_size=320), FullAttentionSpec(block_size=4080)], "have 16320 tokens in common"),
        ([FullAttentionSpec(), SlidingWindowSpec(prefix_replay_tokens=8)], "compute a part of each hit again"),
    ],
)
def test_groups_that_cannot_be_served_are_refused_by_name(specs: list[Any], words: str) -> None:
    with pytest.raises(ConnectorRefused, match=words):
        require_supported(vllm_config(), overlaid(*specs))


def test_finer_keys_than_blocks_are_refused() -> None:
    finer = overlaid(MambaSpec(), FullAttentionSpec())
    finer.hash_block_size = 16
    with pytest.raises(ConnectorRefused, match=r"keys are of 16 tokens and blocks of .32.*--prefix-match-unit"):
        require_supported(vllm_config(), finer)


def test_layers_of_one_group_keep_the_same() -> None:
    mixed = UniformTypeKVCacheSpecs({"a": FullAttentionSpec(), "b": SlidingWindowSpec()})
    config = layers_outermost()
    config.kv_cache_groups = [SimpleNamespace(kv_cache_spec=mixed)]
    with pytest.raises(ConnectorRefused, match="whose layers keep different blocks"):
        require_supported(vllm_config(), config)


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
def test_roles_for_which_vllm_keeps_pages_that_are_written_are_served(role: str) -> None:
    config = vllm_config()
    config.kv_transfer_config.kv_role = role
    require_supported(config, layers_outermost())


def test_a_producer_is_served_as_both_and_refused_as_the_role_of_a_multi_connector() -> None:
    config, child = vllm_config(), vllm_config()
    config.kv_transfer_config = multi_connector("CachesvcConnector", "ExampleConnector")
    require_supported(child, layers_outermost(), config)
    config.kv_transfer_config.kv_role = "kv_producer"
    with pytest.raises(ConnectorRefused, match=r'kv_role is kv_producer.*write "kv_role": "kv_both"'):
        require_supported(child, layers_outermost(), config)
    alone = vllm_config()
    alone.kv_transfer_config.kv_role = "kv_producer"
    serve_producer(alone.kv_transfer_config)
    assert alone.kv_transfer_config.kv_role == "kv_both"
    require_supported(alone, layers_outermost())


def test_under_a_multi_connector_another_one_before_it_is_refused() -> None:
    config = vllm_config()
    config.kv_transfer_config = multi_connector("ExampleConnector", "CachesvcConnector")
    with pytest.raises(ConnectorRefused, match="ExampleConnector, CachesvcConnector: write CachesvcConnector first"):
        require_supported(vllm_config(), layers_outermost(), config)


def multi_connector(*names: str) -> SimpleNamespace:
    """The outer configuration, with these children."""
    children = [{"kv_connector": name} for name in names]
    return SimpleNamespace(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": children}
    )
