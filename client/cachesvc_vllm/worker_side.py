"""The worker's side: vLLM's KV memory is the daemon's slab, and loads from the host are watched until they end."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import vllm
import vllm.envs as envs
from cachesvc_client import AttachedPool, CacheClientError, DaemonUnavailable, LeaseLost
from cachesvc_client.adapters.layer_waits import LayerWaits
from cachesvc_client.memory.pool import LoadOutcome
from cachesvc_client.plugins.facts import display_name
from cachesvc_client.plugins.keeper import ConnectorRefused
from cachesvc_client.plugins.node import Laps, Node, Share, new_instance
from cachesvc_client.plugins.outbox import LEASE_LOOK_S as LOOK_S
from torch.overrides import TorchFunctionMode
from vllm.config import CUDAGraphMode, get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from cachesvc.model.answers import TicketView
from cachesvc.model.layout import Layout, device_geometry
from cachesvc_vllm.adapters import LoadedAdapters
from cachesvc_vllm.cache_groups import (
    Placement,
    group_parts,
    layers_in_order,
    most_drafts,
    place_wider_first,
    placement_of,
    slab_layout,
)
from cachesvc_vllm.identity import config_details
from cachesvc_vllm.media import Runtime, Sharing, layer_facts, model_facts, model_name, replaced_weights
from cachesvc_vllm.plain import Start, WarmUp, agreed_model, has_late_kernels
from cachesvc_vllm.refusals import require_supported, require_version
from cachesvc_vllm.settings import FLAGS, Settings
from cachesvc_vllm.transfers import EarlyLoad, StepTransfers, WorkerLease, lapsed_blocks

T = TypeVar("T")

PACKAGES = ("torch", "triton", "flashinfer-python", "flash-attn", "deep-gemm", "flash-mla", "sgl-kernel")
"""Packages that attention and matrix products come from, beside vLLM's own extensions."""

EMPTY_STEP_S = 0.005
"""Time that a step which computes nothing waits for a load, or for the daemon. A request that comes meanwhile is
scheduled that much later."""

log = init_logger("vllm." + __name__)


class RankReport(NamedTuple):
    """Report of a rank to all others before it has its slab. ``uuid``: of its GPU, empty without one. ``placement``,
    ``facts``: of its layers."""

    uuid: str
    instance: str
    placement: Placement
    facts: Mapping[str, str]


class WorkerSide:
    """Made in each worker process, before its KV memory is. ``share``: what is the daemon's, once it is;
    ``comes_back``: after a loss it can go on with the next daemon; ``instance``: of this start of the engine, all of
    whose ranks have the same; ``replaced``: see ``WorkerShare``. ``is_first_stage``: of a pipeline. ``adapters``: those
    that are loaded; None: the engine takes none."""

    adapters: LoadedAdapters | None = None

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        require_version(vllm.__version__, allow_any=settings.allow_untested_vllm)
        require_supported(vllm_config, kv_cache_config, get_current_vllm_config_or_none())
        if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
            log.warning('a request whose load fails will fail: set "kv_load_failure_policy": "recompute"')
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self.share: Share | None = None
        self.comes_back = False
        self.instance = self.replaced = ""
        self._node: Node | None = None
        self._mode: SlabMode | None = None
        self._copier: PageCopier | None = None
        self._warm_up = WarmUp()
        self._loads: dict[str, tuple[TicketView, ...]] = {}
        self._may_wait = False
        self._early: dict[str, EarlyLoad] = {}
        self._lacking: set[int] = set()
        self._layers: dict[str, int] = {}
        self._asked: set[str] = set()
        self._has_layer_calls = True
        self._waits = LayerWaits(lambda: self._pool, torch.cuda.current_stream)
        self._drafts = has_late_kernels(vllm_config)
        self._told: WorkerLease | None = None
        self.is_first_stage = bool(get_pp_group().is_first_rank)
        self._tells_blocks = len(kv_cache_config.kv_cache_groups) == 1
        if vllm_config.lora_config is not None:
            self.adapters = LoadedAdapters(_rank())

    @property
    def _pool(self) -> AttachedPool:
        assert self._node is not None
        return self._node.pool

    def memory_context(self) -> SlabMode | None:
        """Context in which vLLM allocates its KV memory; None: as without a connector, where no daemon is required or
        there. Every rank calls it, and has the same of these, or an error."""
        config, instance = self._kv_cache_config, new_instance(str(self._vllm_config.kv_transfer_config.engine_id))
        runtime = _runtime(self._vllm_config)
        place_wider_first(config)
        told = _tell_all(RankReport(_uuid(), instance, placement_of(config), layer_facts(config, runtime.backends)))
        self.instance = told[0].instance
        try:
            node = self._start(runtime, told)
        except BaseException as error:
            _tell_all(Start(failure=f"{type(error).__name__}: {error}"))
            raise
        model = ""
        try:
            mine = Start("" if node is None else node.share.model, replaced=self.replaced)
            starts = _tell_all(mine)
            model = agreed_model(starts)
            self.replaced = next((each.replaced for each in starts if each.replaced), "")
        finally:
            if node is not None and not model:
                node.close()
        if node is None or not model:
            return None
        self._node, self.share = node, node.share
        slab, size = node.share.slabs[0], self._kv_cache_config.kv_cache_tensors[0].size
        self.comes_back = node.comes_back = node.pool.memory(slab).can_map_over
        self._mode = SlabMode(node.pool.slab_to_torch(slab).view(torch.int8)[:size])
        self._copier = PageCopier(self._mode.slab, node.share.layout, node.share.pages)
        self._layers = layers_in_order(self._kv_cache_config)
        return self._mode

    def check_memory(self, kv_caches: Mapping[str, Any]) -> None:
        """Check that all layers lie on the slab, before vLLM warms up. Raises ConnectorRefused."""
        if self._node is None or self._mode is None:
            return
        require_on_slab(kv_caches, self._mode.slab, self._mode.given)
        self._node.keep_address()
        self._check("the start, before warm-up")
        self._warm_up.begin()

    def end_warm_up(self) -> None:
        """End the warm-up: requests write from here on. Raises PageChanged, where that is looked for."""
        self._warm_up.end()
        self._check("the start, after warm-up")

    def begin_step(self, next_lease: str) -> None:
        """Move to another lease, which the scheduler asks for after a loss, when nothing uses any page; it uses that
        lease's pages once all ranks have moved. Raises as ``Node.follow``."""
        if self._node is None or not next_lease:
            return
        if self._node.pool.is_on_gpu:
            torch.cuda.synchronize()  # kernels of the last step: preempted requests have no more
        self._told = WorkerLease(self._node.follow(next_lease))

    def take_lease(self) -> WorkerLease | None:
        """Return the lease whose slab the tensors lie on, for the scheduler, in a step in which it asked; whether the
        step is void, where block ids cannot say it; and which adapters are loaded, where that is news."""
        told, self._told = self._told, None
        report = None if self.adapters is None else self.adapters.report()
        return told if report is None else replace(told or WorkerLease(""), adapters=report)

    def start_early(self, step: StepTransfers, *, calls_layers: bool) -> None:
        """Have this step's kernels wait for its early loads, and copy its pages before them. ``calls_layers``: each
        layer asks for its part; else, and where pages are copied, all of them wait for all."""
        if self.adapters is not None:
            self.adapters.begin_step(step.adapters, step.adapters_epoch)
        self._early = step.early
        self._asked.clear()
        self._waits.begin(ticket for load in step.early.values() for ticket in load.tickets)
        if step.copies or self._drafts or not (calls_layers and self._has_layer_calls):
            self._waits.wait_all()
        if step.copies:
            assert self._copier is not None
            self._copier.copy(step.copies)

    def wait_layer(self, name: str) -> None:
        """A layer of this step is launched."""
        if self._waits.is_waiting:
            self._asked.add(name)
            self._waits.wait(self._layers.get(name, max(self._layers.values())))

    def start_loads(self, loads: Mapping[str, tuple[TicketView, ...]], *, may_wait: bool) -> None:
        """Watch these loads. ``may_wait``: this step computes nothing, so it may stay until the next of them ends."""
        self._loads.update(loads)
        self._may_wait = may_wait
        if may_wait and self._drafts and self._node is not None and self._node.pool.is_on_gpu:
            torch.cuda.synchronize()  # the scheduler tells what drafters wrote once this step's output has come

    def take_results(self) -> KVConnectorTransferResults:
        """Loads that have ended since, well or not. Those of the step itself end before: its tokens depend on them."""
        results, node = KVConnectorTransferResults(), self._node
        self._end_early()
        if node is None or not self._loads:
            if node is not None and self._may_wait and node.lease.is_lost:
                node.wait_back(EMPTY_STEP_S)  # requests wait for the daemon, which needs this processor to start
            return results
        oldest = next(iter(self._loads.values()))
        if self._may_wait and oldest:
            with suppress(CacheClientError):  # what has become of it is looked at below
                node.pool.wait_ticket(oldest[-1], EMPTY_STEP_S)
        for request_id, tickets in list(self._loads.items()):
            outcomes = {node.pool.outcome(ticket) for ticket in tickets}
            if LoadOutcome.RUNNING in outcomes or (LoadOutcome.LOST in outcomes and not node.pool.is_quiet):
                continue  # of what is lost something may land in the very pages that are to be computed anew
            del self._loads[request_id]
            results.finished_recving.add(request_id)
            if outcomes - {LoadOutcome.CAME}:
                results.failed_recving.add(request_id)
        return results

    def invalid_blocks(self) -> set[int]:
        """Blocks that the early loads of this step did not bring, or ``lapsed_blocks``."""
        lacking, self._lacking = self._lacking, set()
        return lacking | self.lapsed_blocks()

    def _end_early(self) -> None:
        """Wait for the early loads of the step that was launched, and note which of them failed. The step is void where
        a layer has not asked, as indexers do not: it may have read its blocks before they came."""
        early, self._early = self._early, {}
        if not early:
            return
        was_asked = not self._waits.is_waiting or self._asked >= self._layers.keys()
        was_whole = was_asked and self._waits.is_sound
        self._has_layer_calls &= was_asked
        self._waits.begin(())
        for name, load in early.items():
            outcomes = {self._waits.end(ticket) for ticket in load.tickets}
            if outcomes - {LoadOutcome.CAME} or not was_whole:
                log.warning("early_load_void request=%s outcomes=%s", name, [each.value for each in outcomes])
                self._lacking.update(load.pages)

    def lapsed_blocks(self) -> set[int]:
        """All blocks, where the daemon reports in a computing step that the lease is lost: the step may have read
        others' pages. Kernels may still run, and this process may be stopped again, so the scheduler decides. Of models
        with several groups vLLM takes no block ids: the scheduler hears it by ``take_lease``."""
        node = self._node
        if node is None or self._may_wait or node.lease.is_sure:
            return set()
        if node.pool.is_on_gpu:
            torch.cuda.synchronize()
        try:
            node.lease.make_sure(LOOK_S)
        except LeaseLost as lost:
            log.warning("pages_lapsed why=%s", lost)
            if self._tells_blocks:
                return lapsed_blocks(node.share.pages)
            self._told = WorkerLease("", has_lapsed=True)
        except CacheClientError as error:
            log.debug("pages_not_known why=%s", error)
        return set()

    def close(self) -> None:
        """Unmap, as far as nothing is held. Idempotent."""
        self._warm_up.end()
        if self._node is not None:
            self._node.close()

    def _start(self, runtime: Runtime, ranks: Sequence[RankReport]) -> Node | None:
        """Have this rank's slab; None where no daemon is there, and none is required."""
        config, settings, laps = self._kv_cache_config, self._settings, Laps()
        stages = [each.placement for each in ranks[:: get_tp_group().world_size]]
        pipeline = [each.facts for each in ranks] if len(stages) > 1 else []
        facts = model_facts(self._vllm_config, config, settings.model, runtime, settings.draft_blocks, pipeline)
        name, self.replaced = model_name(facts), replaced_weights(self._vllm_config, settings.model)
        shown = display_name(self._vllm_config.model_config.model)
        layout = slab_layout(config, len(ranks), stages)
        longest = -(-self._vllm_config.model_config.max_model_len // layout.block_tokens) + most_drafts(config)
        devices = tuple(each.uuid for each in ranks if each.uuid)
        share = Share(name, layout, config.num_blocks, devices, shown, longest, group_parts(config))
        laps.lap("facts")
        if _rank() == 0:
            media = Sharing(settings.share_media).name.lower()
            log.info("shares_as model=%s name=%s media_by=%s facts=%s", name, shown, media, facts)
            log.info("shares_by model=%s options=%s", name, config_details(self._vllm_config, runtime.environment))
        node = Node(self._settings, self.instance, share, attaches=True, flags=FLAGS, rank=_rank())
        try:
            node.start()
        except DaemonUnavailable as gone:
            node.close()
            if self._settings.required:
                raise ConnectorRefused(
                    f"no cachesvcd answers at {node.socket_path} ({gone}): start it, or go on without by "
                    '"required": false in kv_connector_extra_config'
                ) from gone
            log.warning("no_daemon socket=%s: this engine shares nothing", node.socket_path)
            return None
        except BaseException:
            node.close()
            raise
        log.info("started_on_slab %s %s", laps, node.started_in)
        return node

    def _check(self, when: str) -> None:
        """The first rank has the daemon look at the pages of all."""
        if self._node is not None and _rank() == 0:
            self._node.page_check().check(when)


def calls_layers(forward_context: Any) -> bool:
    """Return True where each layer of the step at hand asks for its blocks: not where one graph has all of them."""
    mode = getattr(forward_context, "cudagraph_runtime_mode", None)
    return getattr(forward_context, "attn_metadata", None) is not None and mode is not CUDAGraphMode.FULL


def _rank() -> int:
    """Rank of this worker in its engine: of a pipeline, all ranks of a stage come one after another."""
    return int(get_pp_group().rank_in_group * get_tp_group().world_size + get_tp_group().rank_in_group)


def _tell_all(mine: T) -> list[T]:
    """Reports of all ranks, in their order."""
    told = [mine]
    for ranks in (get_tp_group(), get_pp_group()):
        parts: list[Any] = [told] * ranks.world_size
        if ranks.world_size > 1:
            torch.distributed.all_gather_object(parts, told, group=ranks.cpu_group)
        told = [each for part in parts for each in part]
    return told


def _uuid() -> str:
    """UUID of this process's GPU, empty without one."""
    if not torch.cuda.is_available():
        return ""
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def _releases() -> dict[str, str]:
    """Releases of the installed packages that compute."""
    found = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _processor() -> str:
    """The kind of GPU, or of processor, that kernels are chosen for."""
    if not torch.cuda.is_available():
        return platform.machine()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{properties.name}, sm_{properties.major}{properties.minor}"


def _runtime(vllm_config: Any) -> Runtime:
    return Runtime(
        release=vllm.__version__,
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        hash_root=resolve_none_hash_seed(get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)),
        backends=tuple(sorted(each.get_name() for each in get_current_attn_backends(vllm_config))),
        packages=_releases(),
        processor=_processor(),
        environment=envs.compile_factors(),
    )


ITEM_BYTES = 8
"""Bytes of an item that planes are copied in, where all planes begin and end with one: an eighth of the work."""


class PageCopier:
    """``slab``: all bytes of a pool's slab (int8 ``[bytes]``) of ``pages`` pages, in which the planes of the layout's
    first group have all bytes of a page."""

    def __init__(self, slab: Any, layout: Layout, pages: int) -> None:
        spans = device_geometry(layout, 0, pages).spans
        places = [(span.offset, span.page_stride, span.width) for span in spans]
        unit = 1 if any(number % ITEM_BYTES for place in places for number in place) else ITEM_BYTES
        items = slab[: slab.numel() // unit * unit]
        if unit > 1:
            import torch

            items = items.view(torch.int64)
        begin = items.storage_offset()
        self._planes = [
            items.as_strided((count, pages, width // unit), (step // unit, stride // unit, 1), begin + first // unit)
            for first, step, stride, width, count in _regions(places)
        ]

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy pages ``(source, target)``, on the current stream."""
        for source, target in pairs:
            for planes in self._planes:
                planes[:, target].copy_(planes[:, source])


def _regions(places: list[tuple[int, int, int]]) -> list[tuple[int, int, int, int, int]]:
    """Planes at equal distances: the first one's offset, the distance, bytes from page to page and of a page, and how
    many there are. A kernel copies all of a region's planes."""
    regions: list[tuple[int, int, int, int, int]] = []
    steps = [after[0] - before[0] for before, after in pairwise(places)]
    for (offset, stride, width), step in zip(places, [0, *steps], strict=True):
        if regions:
            first, distance, *form, count = regions[-1]
            if form == [stride, width] and (count == 1 or step == distance):
                regions[-1] = first, step, stride, width, count + 1
                continue
        regions.append((offset, 0, stride, width, 1))
    return regions


class SlabMode(TorchFunctionMode):  # type: ignore[misc]
    """Mode in which ``torch.zeros`` of exactly the slab's size gives ``slab`` (int8 ``[bytes]``)."""

    def __init__(self, slab: Any) -> None:
        super().__init__()
        self.slab = slab
        self.given = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.zeros and _size(args) == self.slab.numel():
            self.given += 1
            return self.slab
        return func(*args, **(kwargs or {}))


def _size(args: tuple[Any, ...]) -> int | None:
    """The size of a tensor that is to have one dimension."""
    first = args[0] if len(args) == 1 else None
    if isinstance(first, tuple | list | torch.Size) and len(first) == 1:
        first = first[0]
    return first if isinstance(first, int) else None


def require_on_slab(kv_caches: Mapping[str, Any], slab: Any, given: int) -> None:
    """Raises ConnectorRefused unless vLLM took the slab, once, and every layer lies on it."""
    storage = slab.untyped_storage().data_ptr()
    elsewhere = [
        name
        for name, tensors in kv_caches.items()
        for tensor in (tensors if isinstance(tensors, list | tuple) else [tensors])  # a state has several
        if tensor.untyped_storage().data_ptr() != storage
    ]
    if given != 1 or elsewhere:
        raise ConnectorRefused(
            f"vLLM asked {given} times for the daemon's {slab.numel()} bytes, and {len(elsewhere)} of {len(kv_caches)} "
            "layers lie elsewhere: this release allocates in a way that the connector does not know"
        )
