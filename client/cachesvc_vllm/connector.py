"""``CachesvcConnector``: vLLM's interface for connectors, a line for each hook; what it does is on its two sides."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

from cachesvc_client.plugins.node import Node
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from cachesvc_vllm.handover import answer_of
from cachesvc_vllm.kv_events import PublisherTap, tap_publisher
from cachesvc_vllm.media import look_at_loads
from cachesvc_vllm.metrics import CacheMetrics, CacheStats
from cachesvc_vllm.plain import draft_lookahead, has_late_kernels, log_as_vllm
from cachesvc_vllm.refusals import serve_producer
from cachesvc_vllm.scheduler_side import SchedulerSide
from cachesvc_vllm.settings import FLAGS, read_settings
from cachesvc_vllm.transfers import StepTransfers, WorkerLease, WorkerShare, has_lapsed
from cachesvc_vllm.worker_side import WorkerSide, calls_layers

log = logging.getLogger(__name__)

look_at_loads()  # vLLM imports this with its configuration, before it loads weights; a worker that it spawns does not


class CachesvcConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM makes one for the scheduler and one for each worker. By ``SupportsHMA`` it divides the layers of a hybrid
    model into groups, each of which keeps what it needs."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_as_vllm()
        serve_producer(vllm_config.kv_transfer_config)
        self._settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        self._tap: PublisherTap | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._tap = tap_publisher(vllm_config)
        if role is KVConnectorRole.WORKER:
            self._worker = WorkerSide(vllm_config, kv_cache_config, self._settings)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003 - vLLM's
        """True: KV memory is the daemon's and is never remapped. Sleep frees the weights alone."""
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        """False: unpublished blocks may be lost without harm."""
        return False

    # -- worker ------------------------------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """Context in which KV memory is allocated."""
        assert self._worker is not None
        return self._worker.memory_context()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        assert self._worker is not None
        self._worker.check_memory(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert self._worker is not None
        if isinstance(kv_connector_metadata, StepTransfers):
            self._worker.begin_step(kv_connector_metadata.next_lease)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """The daemon loads by itself. Comes before the kernels of a step with copies or early loads."""
        assert self._worker is not None
        metadata = self._get_connector_metadata()
        if isinstance(metadata, StepTransfers):
            self._worker.start_early(metadata, calls_layers=calls_layers(forward_context))
            self._worker.start_loads(metadata.loads, may_wait=metadata.is_empty)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A layer is about to read its blocks, of which an early load may still bring some."""
        assert self._worker is not None
        self._worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """KV is in place."""

    def wait_for_save(self) -> None:
        """KV is in place."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        return self._worker.take_results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose readers vLLM computes again: those that an early load did not bring, or all of them, where this
        engine has lost them to others."""
        assert self._worker is not None
        return self._worker.invalid_blocks()

    def build_connector_worker_meta(self) -> WorkerLease | None:
        """Lease that this worker is on, for a scheduler that asked to move, and the adapters that it has loaded."""
        assert self._worker is not None
        return self._worker.take_lease()

    def get_handshake_metadata(self) -> WorkerShare | None:
        """Share of this worker, for the scheduler: whether, and as what, the memory is the daemon's. Asked once, when
        the worker has warmed up and before any request: later hooks come when the first request's table is written.
        Later stages of a pipeline say nothing: connectors beside ours may refuse what they say."""
        assert self._worker is not None
        self._worker.end_warm_up()
        worker = self._worker
        if worker.share is None or not worker.is_first_stage:
            return None
        return WorkerShare(worker.share, worker.comes_back, worker.instance, worker.replaced)

    # -- scheduler ---------------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """The workers' memory is the daemon's: block ids are its pages from here on. Nothing said, or by a sibling
        under a MultiConnector alone: it is vLLM's own. vLLM 0.33 says it again whenever it wakes: no-op then."""
        told = metadata.get(0)
        if self._scheduler is not None or not isinstance(told, WorkerShare):
            return
        assert self._kv_cache_manager is not None
        node = Node(self._settings, told.instance, told.share, attaches=False, flags=FLAGS)
        node.comes_back = told.comes_back
        try:
            node.start()
            log.info("scheduler_has_lease %s", node.started_in)
            step_tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
            publisher = None if self._tap is None else self._tap.publisher
            config = self._vllm_config
            lookahead, drafts = draft_lookahead(config), has_late_kernels(config)
            self._scheduler = SchedulerSide(
                node,
                self._settings,
                step_tokens,
                lookahead,
                most_requests=config.scheduler_config.max_num_seqs,
                drafts=drafts,
                publisher=publisher,
                lora_config=config.lora_config,
                ranks=config.parallel_config.tensor_parallel_size * config.parallel_config.pipeline_parallel_size,
                replaced=told.replaced,
            )
        except BaseException:
            node.close()
            raise
        self._scheduler.bind(self._kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.expect(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens to load from the host, or to copy within the device (not asynchronous); None: ask again later."""
        return (0, False) if self._scheduler is None else self._scheduler.host_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.note_load(request, num_external_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        """Loads that have ended on every rank, where these are, and whether one found its step void."""
        if self._scheduler is not None:
            if isinstance(told := connector_output.kv_connector_worker_meta, WorkerLease):
                self._scheduler.move(told.lease_id)
                if told.has_lapsed:
                    self._scheduler.drop_step(repeats=False)
                if told.adapters is not None:
                    self._scheduler.note_adapters(told.adapters)
            if has_lapsed(connector_output.invalid_block_ids):
                self._scheduler.drop_step(repeats=True)
            ended, failed = connector_output.finished_recving, connector_output.failed_recving
            self._scheduler.note_ends(ended or (), failed or (), connector_output.invalid_block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._scheduler is None:
            return StepTransfers()
        is_empty = not scheduler_output.total_num_scheduled_tokens
        self._scheduler.begin_step(scheduler_output.num_scheduled_tokens)
        step = self._scheduler.take_transfers(is_empty=is_empty)
        if step.copies:
            scheduler_output.has_sync_kv_loads = True  # workers call start_load_kv before they compute
        return step

    def has_pending_block_frees(self) -> bool:
        """Pages of requests that have ended come back without preempting others."""
        return self._scheduler is not None and self._scheduler.has_late_pages

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Note the end of a request; its blocks may be freed. A router may want to know where they are."""
        if self._scheduler is None:
            return False, None
        self._scheduler.finish(request)
        config = self._vllm_config
        ranks = config.parallel_config.tensor_parallel_size
        engine_id = config.kv_transfer_config.engine_id
        return False, answer_of(request, self._scheduler.peer_address, engine_id, ranks)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do ``request_finished``, of a model with any number of groups: what vLLM calls."""
        return self.request_finished(request, block_ids[0])

    def take_events(self) -> tuple[()]:
        """Comes last in each step. Events are published without vLLM's steps (``kv_events``)."""
        if self._scheduler is not None:
            self._scheduler.end_step()
        return ()

    def reset_cache(self) -> bool:
        return True

    # -- both --------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> CacheStats | None:
        """Statistics of the scheduler since the last call."""
        stats = None if self._scheduler is None else self._scheduler.take_stats()
        return None if stats is None or stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CacheStats | None:
        return CacheStats() if data is None else CacheStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> CacheMetrics:
        """Made once, where vLLM's own metrics are."""
        return CacheMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End the lease, or vLLM would wait for its threads."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()
