"""Holds what the connector replaces and implements against releases of vLLM, by their sources; prints what differs.

    python -m tests.vllm.signatures                                # the installed release, and those that were recorded
    python -m tests.vllm.signatures FOLDER > tests/vllm/releases/0.33.json     # record the one whose package is there

Only a release that is installed can be run; of the others this much is known.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RELEASES = Path(__file__).parent / "releases"

CLASSES = {
    "BlockPool": "v1/core/block_pool.py",
    "KVCacheManager": "v1/core/kv_cache_manager.py",
    "KVConnectorBase_V1": "distributed/kv_transfer/kv_connector/v1/base.py",
    "SupportsHMA": "distributed/kv_transfer/kv_connector/v1/base.py",
    "KVConnectorStats": "distributed/kv_transfer/kv_connector/v1/metrics.py",
    "KVConnectorPromMetrics": "distributed/kv_transfer/kv_connector/v1/metrics.py",
}

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

SINCE = {"supports_sleep_mode": "0.33"}
"""Hooks that older releases do not know, and do without."""

TEXTS = {
    "v1/request.py": (
        "self.all_token_ids",
        "self.cache_salt",
        "self.mm_features",
        "self.prompt_embeds",
        "self.num_in_flight_tokens",
        "self.num_computed_tokens",
        "self.block_hashes: list[BlockHash] = []",
        "self.block_hashes.extend(self._block_hasher(self))",
        "self.num_preemptions",
        "self.num_stale_output_tokens",
        "self.drop_stale_output",
    ),
    "v1/core/sched/output.py": ("has_sync_kv_loads: bool = False",),
    "v1/worker/gpu/kv_connector.py": ("if scheduler_output.has_sync_kv_loads:",),
    "v1/worker/kv_connector_model_runner_mixin.py": ("not scheduler_output.has_sync_kv_loads",),
    "forward_context.py": ("cudagraph_runtime_mode:", "attn_metadata:"),
    "model_executor/layers/attention/kv_transfer_utils.py": ("connector.wait_for_layer_load(layer_name)",),
    "v1/core/single_type_kv_cache_manager.py": (
        "self.req_to_blocks: defaultdict",
        "self._null_block = block_pool.null_block",
        "num_local_computed_tokens: int,",
        "prefill_end: int = 0,",
        "self.num_speculative_blocks: int = ",
        "self, req_blocks: list[KVCacheBlock], block_idx: int",
        "self._relocate_speculative_block(req_blocks, block_idx)",
    ),
    "v1/core/kv_cache_coordinator.py": ("self.retention_interval = ", "self.attention_groups: list[SpecGroup] = []"),
    "v1/core/block_pool.py": ("self.hash_block_size", "self.null_block", "self.num_gpu_blocks"),
    "v1/core/kv_cache_manager.py": ("self.empty_kv_cache_blocks",),
    "v1/worker/utils.py": ("buf = torch.zeros(buf_size, dtype=torch.int8, device=device)",),
    "v1/worker/gpu/block_table.py": ("if self.redirect_writes_to_null_block:",),
    "v1/core/kv_cache_utils.py": (
        "def resolve_none_hash_seed(",
        "def generate_block_hash_extra_keys(",
        "def maybe_convert_block_hash(",
        "def to_event_extra_keys(",
        'extra_keys.append(("mm", mm_feature.identifier, offset - start_token_idx))',
    ),
    "distributed/kv_events.py": (
        "def register_publisher(cls, name",
        "    def create(",
        "lora_name:",
        "extra_keys:",
        "group_idx:",
    ),
    "v1/kv_cache_interface.py": (
        "kv_cache_layout:",
        "hash_block_size:",
        "host_resident:",
        "def prefix_replay_tokens(",
        "max_tp_shards:",
    ),
    "config/parallel.py": ("def nnodes_within_dp(",),
    "distributed/parallel_state.py": (
        *("def get_tp_group(", "def get_pp_group("),
        *("self.cpu_group", "self.rank_in_group", "self.world_size", "def is_first_rank("),
    ),
    "lora/request.py": ("lora_int_id:", "lora_path:", "lora_name:"),
    "lora/worker_manager.py": (
        "def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:",
        "def add_adapter(self, lora_request: LoRARequest)",
        "or lora_request.load_inplace",
        "self._adapter_manager.add_adapter(lora)",
    ),
    "lora/model_manager.py": ("def list_adapters(self) -> dict[int, LoRAModel]:",),
    "lora/lora_model.py": ("self.loras: dict[str, LoRALayerWeights] = ", "self.modules_to_save = ", "self.id = "),
    "config/lora.py": ("max_loras: int", "max_cpu_loras: int", "enable_tower_connector_lora: bool"),
    "v1/executor/abstract.py": ("def add_lora(self, lora_request", "def remove_lora(self, lora_id"),
    "v1/worker/lora_model_runner_mixin.py": ("self.lora_manager = LRUCacheWorkerLoRAManager(",),
    "v1/worker/gpu_worker.py": (
        "self.model_runner: GPUModelRunner = ",
        "ensure_kv_transfer_initialized(self.vllm_config, kv_cache_config)",
    ),
    "model_executor/model_loader/base_loader.py": ("self, vllm_config: VllmConfig, model_config: ModelConfig, prefix",),
    "multimodal/inputs.py": (
        'data: "MultiModalKwargsItem | None"',
        "identifier: str",
        "mm_position: PlaceholderRange",
        "mm_hash: str | None = None",
        "is_embed:",
        "class MultiModalKwargsItem(UserDict[str, MultiModalFieldElem]):",
    ),
    "multimodal/cache/shm.py": ('if "monotonic_id" not in mm_item',),
    "v1/core/sched/scheduler.py": (
        "if multiple_inflight_batches and kv_transfer_config.is_kv_consumer:",
        "if not self._request_blocks_can_be_freed(preempted_req):",
        "request.num_stale_output_tokens -= num_tokens_scheduled",
        "if output_is_stale and request.drop_stale_output:",
    ),
    "v1/outputs.py": ("finished_recving:", "failed_recving:", "invalid_block_ids:"),
}
"""Attributes that are read, or stepped into, without being called by a signature; of alternatives one."""

IN_ORDER = {
    "v1/engine/core.py": (
        "self._initialize_kv_caches(",
        "self._set_kv_connector_handshake_metadata()|self.model_executor.get_kv_connector_handshake_metadata()",
        "self.batch_queue_size",
    ),
    "v1/core/sched/scheduler.py": (
        "KVConnectorFactory.create_connector(",
        "EventPublisherFactory.create(",
        "def update_from_output(",
        "if kv_connector_output and kv_connector_output.invalid_block_ids:",
        "self._update_from_kv_xfer_finished(kv_connector_output)",
        "connector_events = self.connector.take_events()",
        "return engine_core_outputs",
    ),
}
"""Workers warm up, are asked what they share, and only then is anything run. What a worker found void is dropped, the
scheduler's side learns of it, and has the last word before tokens are given out."""


def surface(package: Path) -> dict[str, Any]:
    """Surface of the package in a folder that the connector relies on."""
    found: dict[str, Any] = {}
    for name, path in CLASSES.items():
        tree = ast.parse((package / path).read_text(encoding="utf-8"))
        (body,) = [each.body for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name]
        found[name] = {each.name: _names(each.args) for each in body if isinstance(each, ast.FunctionDef)}
    found["lacks"] = [
        f"{path}: {text}"
        for path, texts in TEXTS.items()
        for text in texts
        if not any(each in (package / path).read_text(encoding="utf-8") for each in text.split("|"))
    ]
    for path, texts in IN_ORDER.items():
        core = (package / path).read_text(encoding="utf-8")
        places = [min((core.find(each) for each in text.split("|") if each in core), default=-1) for text in texts]
        if -1 in places or places != sorted(places):
            found["lacks"].append(f"{path}: {', '.join(texts)} in this order")
    return found


def differences(release: str, told: dict[str, Any]) -> Iterator[str]:
    """Differences from a release, one a line."""
    from cachesvc_vllm import CachesvcConnector
    from cachesvc_vllm.block_pool import DaemonBlockPool
    from cachesvc_vllm.metrics import CacheMetrics, CacheStats
    from cachesvc_vllm.refusals import POOL_METHODS as KNOWN_METHODS
    from cachesvc_vllm.scheduler_side import SchedulerSide

    public = {name for name in told["BlockPool"] if not name.startswith("_")}
    if public != POOL_METHODS:
        yield f"{release}: methods of the block pool: {sorted(public ^ POOL_METHODS)}"
    if more := set(told["BlockPool"]) - KNOWN_METHODS - {"__init__"}:
        yield f"{release}: methods of the block pool that a start refuses: {sorted(more)}"
    replaced = sorted(public - INHERITED)
    yield from _unlike(release, DaemonBlockPool, {name: told["BlockPool"][name] for name in replaced})
    managed = ("get_computed_blocks", "allocate_slots")
    yield from _unlike(release, SchedulerSide, {name: told["KVCacheManager"][name] for name in managed})
    for mine, theirs in (
        (CachesvcConnector, told["KVConnectorBase_V1"] | told["SupportsHMA"]),
        (CacheStats, told["KVConnectorStats"]),
        (CacheMetrics, told["KVConnectorPromMetrics"]),
    ):
        own = {name for name, each in vars(mine).items() if inspect.isroutine(each) and not name.startswith("_")}
        expected = {name for name in own if _numbers(release) >= _numbers(SINCE.get(name, "0"))}
        yield from (f"{release}: there is no hook {name}" for name in sorted(expected - theirs.keys()))
        yield from _unlike(release, mine, {name: theirs[name] for name in sorted(own & theirs.keys())})
    yield from (f"{release}: {text}" for text in told["lacks"])


def _unlike(release: str, mine: type, theirs: dict[str, list[str]]) -> Iterator[str]:
    """Methods of ours that cannot be called as theirs are."""
    for name, parameters in theirs.items():
        if name not in vars(mine):
            yield f"{release}: {mine.__name__} lacks {name}"
            continue
        own = [each for each in inspect.signature(getattr(mine, name)).parameters.values() if each.name != "self"]
        plain = [each for each in own if each.kind is each.POSITIONAL_OR_KEYWORD]
        takes_any = any(each.kind is each.VAR_POSITIONAL for each in own)
        names, more = [each.name for each in plain], plain[len(parameters) :]
        wanted = parameters[: len(names)] if takes_any else parameters
        if names[: len(wanted)] != wanted or any(each.default is each.empty for each in more):
            yield f"{release}: {mine.__name__}.{name} takes {names}, and is called with {parameters}"


def _numbers(release: str) -> list[int]:
    """A release's first two numbers, for comparing."""
    return [int(each) for each in release.split(",", maxsplit=1)[0].split(".")[:2]]


def _names(arguments: ast.arguments) -> list[str]:
    named = [each.arg for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
    return [name for name in named if name not in ("self", "cls")]


def main() -> None:
    """Record, or compare."""
    if len(sys.argv) > 1:
        print(json.dumps(surface(Path(sys.argv[1])), indent=1, sort_keys=True))
        return
    import vllm

    told = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RELEASES.glob("*.json"))}
    told[f"{vllm.__version__}, installed"] = surface(Path(vllm.__file__).parent)
    print(json.dumps([each for release, what in told.items() for each in differences(release, what)]))


if __name__ == "__main__":
    main()
