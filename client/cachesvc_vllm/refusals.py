"""Unsupported configurations, refused before anything is allocated, with what works instead."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from cachesvc_client.plugins.keeper import ConnectorRefused

from cachesvc_vllm.cache_groups import CacheGroup, Retention, cache_groups, most_drafts

TESTED = ((0, 32), (0, 33))
"""Releases of vLLM that the connector was tested with: it replaces vLLM's block pool, which is no public API."""
POOL_FIELDS = frozenset(
    {
        *("num_gpu_blocks", "medium", "enable_caching", "hash_block_size", "blocks", "free_block_queue", "null_block"),
        *("cached_block_hash_to_block", "cached_block_hashes_by_block", "enable_kv_cache_events", "kv_event_queue"),
        *("metrics_collector", "_reuse_watchers", "num_hash_lookahead_tokens"),
    }
)
POOL_METHODS = frozenset(
    {
        *("get_cached_block", "cache_full_blocks", "cache_partial_block", "emit_cached_block_events", "get_new_blocks"),
        *("move_block_hashes", "unpin_blocks", "touch", "is_block_writable", "free_blocks", "evict_blocks"),
        *("reset_prefix_cache", "get_num_free_blocks", "get_usage", "take_events", "_build_block_stored_event"),
        *("_get_partial_block_hash", "_get_partial_block_parent_hash_and_start", "_remove_cached_block_hashes"),
        *("_emit_block_removed_events", "_insert_block_hash", "_notify_reuse", "_maybe_evict_cached_block"),
        *("_generate_event_extra_keys", "_lookahead_token_ids"),
    }
)
"""Fields and methods of ``BlockPool`` in these releases. What else one has may hold state or be called by vLLM."""
DIGESTS = ("sha256", "sha256_cbor")
"""Hash algorithms whose digests are 32 bytes, and the same in every process."""


DRAFTERS = (
    *("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"),
    *("draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark"),
)
"""Methods without KV of their own, and those whose KV the keys cover. Other methods may write KV that depends on more
than the keys."""

ROLES = ("kv_both", "kv_consumer")
"""Roles for which vLLM keeps the pages of an ended request until no step under way writes them. Of a producer it frees
them at once, and another engine would get them."""

NAME = "CachesvcConnector"

log = logging.getLogger(__name__)


def require_supported(vllm_config: Any, kv_cache_config: Any, whole_config: Any = None) -> None:
    """``whole_config``: vLLM's own, where a MultiConnector gave this connector a copy of it. Raises ConnectorRefused
    for the first thing that cannot be served."""
    whole = vllm_config if whole_config is None else whole_config
    for why in (
        *_of_role(whole.kv_transfer_config),
        *_of_siblings(whole.kv_transfer_config),
        *_of_parallelism(vllm_config.parallel_config),
        *_of_pipeline(vllm_config),
        *_of_caching(vllm_config),
    ):
        raise ConnectorRefused(f"cachesvc_vllm: {why}")
    kinds = cache_groups(kv_cache_config)
    wanted, pages = _blocks_with_drafts(kv_cache_config, kinds, vllm_config), kv_cache_config.num_blocks
    if pages < wanted:
        raise ConnectorRefused(
            f"cachesvc_vllm: a request of --max-model-len takes {wanted} blocks with its drafts' states, and there are "
            f"{pages}: give more memory, or take a smaller --max-model-len or fewer speculative tokens"
        )


def _blocks_with_drafts(kv_cache_config: Any, kinds: Sequence[CacheGroup], vllm_config: Any) -> int:
    """Number of blocks without which the longest request of a model of states would be preempted again and again, the
    null block included; 0 without drafts. States for drafts move to blocks of their own with a chunk, which vLLM does
    not count (``StateCells``), and make the tables as many blocks longer."""
    drafts = most_drafts(kv_cache_config)
    if not drafts:
        return 0
    longest = int(vllm_config.model_config.max_model_len)
    whole = sum(-(-longest // kind.block_tokens) for kind in kinds if kind.retention is Retention.FULL)
    states = sum(kind.retention is Retention.STATE for kind in kinds)
    return 1 + whole + 2 * states + drafts * (len(kinds) + states)


def serve_producer(transfer: Any) -> None:
    """Have vLLM treat a producer as ``kv_both``, from when it makes the connector on: its scheduler looks at the role
    after that. Under a MultiConnector the role that it looks at is another's."""
    if transfer.kv_role not in ROLES and transfer.kv_connector == NAME:
        log.info("kv_role %s is served as kv_both: pages are kept until no step writes them", transfer.kv_role)
        transfer.kv_role = "kv_both"


def _of_role(transfer: Any) -> list[str]:
    if transfer.kv_role in ROLES:
        return []
    why = f"kv_role is {transfer.kv_role}, for which vLLM frees pages that a step under way still writes"
    return [f'{why}: write "kv_role": "kv_both" beside the MultiConnector, and leave its connectors\' as they are']


def _of_siblings(transfer: Any) -> list[str]:
    """Reasons against sibling connectors under a MultiConnector: the first that has tokens loads them; only the first
    in the list knows that it is the one."""
    children = (transfer.kv_connector_extra_config or {}).get("connectors") or ()
    names = [each.get("kv_connector") for each in children]
    if transfer.kv_connector != "MultiConnector" or names[:1] == [NAME]:
        return []
    return [f"MultiConnector has {', '.join(map(str, names))}: write {NAME} first"]


def _of_parallelism(parallel: Any) -> list[str]:
    sizes = {
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size,
        "decode_context_parallel_size": parallel.decode_context_parallel_size,
    }
    found = [
        f"{name} is {size}, and only 1 is supported: take tensor or pipeline parallelism, or leave the connector out"
        for name, size in sizes.items()
        if size != 1
    ]
    if parallel.nnodes_within_dp != 1:
        found.append(
            f"an engine on {parallel.nnodes_within_dp} nodes is not supported: a daemon has one node's devices"
        )
    return found


def _of_pipeline(vllm_config: Any) -> list[str]:
    parallel, found = vllm_config.parallel_config, []
    if parallel.pipeline_parallel_size == 1:
        return []
    if parallel.distributed_executor_backend != "mp":  # Ray may report the last stage alone: no load would end
        found.append(
            f"pipeline_parallel_size above 1 with --distributed-executor-backend "
            f"{parallel.distributed_executor_backend} is not supported: take mp"
        )
    if vllm_config.speculative_config is not None:
        found.append(
            "speculative decoding with pipeline_parallel_size above 1 is not supported: leave out "
            "--speculative-config, or take tensor parallelism"
        )
    return found


def _of_caching(vllm_config: Any) -> list[str]:
    cache, found = vllm_config.cache_config, []
    if not cache.enable_prefix_caching:
        found.append(
            "prefix caching is off, and the daemon's cache is nothing else: leave out --no-enable-prefix-caching"
        )
    if cache.prefix_caching_hash_algo not in DIGESTS:
        found.append(
            f"--prefix-caching-hash-algo {cache.prefix_caching_hash_algo} is not collision-free and differs between "
            f"processes: take one of {', '.join(DIGESTS)}"
        )
    if getattr(cache, "calculate_kv_scales", False):
        found.append(
            "KV scales that each engine calculates for itself cannot be shared: leave out --calculate-kv-scales"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in DRAFTERS:
        found.append(
            f"speculative decoding by {speculative.method} is not supported: take one of {', '.join(DRAFTERS)}"
        )
    return found


def require_version(version: str, *, allow_any: bool) -> None:
    """Raises ConnectorRefused for a release of vLLM that is not among ``TESTED``, unless ``allow_any``."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) in TESTED:
        return
    known = " and ".join(f"{major}.{minor}" for major, minor in TESTED)
    if not allow_any:
        raise ConnectorRefused(
            f"cachesvc_vllm works with vLLM {known}, and this is {version}: install one of these, or try it at your "
            'own risk with "allow_untested_vllm": true in kv_connector_extra_config'
        )


def require_known_pool(pool: object, *, allow_any: bool) -> None:
    """Compare vLLM's block pool with what was looked at before it is replaced. Raises ConnectorRefused for further
    fields or methods; with ``allow_any`` they are logged."""
    kinds = [kind for kind in type(pool).__mro__ if kind is not object]
    methods = {
        name for kind in kinds for name, each in vars(kind).items() if callable(each) or hasattr(each, "__get__")
    }
    more_methods = {name for name in methods - POOL_METHODS if not name.startswith("__")}
    parts = (("fields", vars(pool).keys() - POOL_FIELDS), ("methods", more_methods))
    unknown = " and ".join(f"the {what} {', '.join(sorted(more))}" for what, more in parts if more)
    if unknown and not allow_any:
        raise ConnectorRefused(
            f"vLLM's block pool has {unknown}, which cachesvc_vllm was not made for: install a release as it was "
            'published, or try it at your own risk with "allow_untested_vllm": true in kv_connector_extra_config'
        )
    if unknown:
        log.warning("block_pool_unknown vLLM's block pool has %s, which cachesvc_vllm was not made for", unknown)
