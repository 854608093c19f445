"""Holds what the connector replaces and implements against the vLLM that is installed; prints what differs.

python -m tests.vllm.signatures
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

POOL_METHODS = {
    "cache_full_blocks",
    "cache_partial_block",
    "emit_cached_block_events",
    "evict_blocks",
    "free_blocks",
    "get_cached_block",
    "get_new_blocks",
    "get_num_free_blocks",
    "get_usage",
    "is_block_writable",
    "move_block_hashes",
    "reset_prefix_cache",
    "take_events",
    "touch",
    "unpin_blocks",
}
INHERITED = {"get_usage", "is_block_writable", "take_events"}
"""Right as they are: they ask the others."""

REQUEST_FIELDS = ("num_in_flight_tokens", "num_computed_tokens", "block_hashes")
POOL_FIELDS = ("hash_block_size", "null_block", "num_gpu_blocks")


def parameters(function: Any) -> list[str]:
    """Names of what it is called with; all is taken where it says so."""
    return [each.name for each in inspect.signature(function).parameters.values() if each.name != "self"]


def differences() -> Iterator[str]:
    """What does not fit, one a line."""
    from cachesvc_vllm import CachesvcConnector
    from cachesvc_vllm.block_pool import DaemonBlockPool
    from cachesvc_vllm.scheduler_side import SchedulerSide
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    found = {name for name, _ in inspect.getmembers(BlockPool, inspect.isfunction) if not name.startswith("_")}
    if found != POOL_METHODS:
        yield f"methods of the block pool: {sorted(found ^ POOL_METHODS)}"
    for name in sorted(found - INHERITED):
        mine, theirs = vars(DaemonBlockPool).get(name), parameters(getattr(BlockPool, name))
        if mine is None or parameters(mine) not in (theirs, ["args", "kwargs"]):
            yield f"BlockPool.{name}: {theirs}"
    for name in ("get_computed_blocks", "allocate_slots"):
        mine, theirs = parameters(getattr(SchedulerSide, name)), parameters(getattr(KVCacheManager, name))
        named = [each for each in mine if each not in ("args", "kwargs")]
        if theirs[: len(named)] != named:
            yield f"KVCacheManager.{name}: {theirs}"
    for name, mine in vars(CachesvcConnector).items():
        base = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name, None)
        if (
            inspect.isfunction(mine)
            and not name.startswith("_")
            and (base is None or parameters(mine) != parameters(base))
        ):
            yield f"hook {name}: {None if base is None else parameters(base)}"
    source = inspect.getsource(Request) + inspect.getsource(BlockPool)
    for field in (*REQUEST_FIELDS, *POOL_FIELDS):
        if f"self.{field}" not in source:
            yield f"there is no {field}"


if __name__ == "__main__":
    print(json.dumps(list(differences())))
