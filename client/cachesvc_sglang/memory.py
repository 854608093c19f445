"""KV memory of an engine: SGLang's buffers are planes of the daemon's slab, and its page ids are the daemon's.

    layer l    k  [ page 0 | page 1 | ... ]    v  [ page 0 | page 1 | ... ]     a page: (tokens, heads, head_dim)
    latents    kv [ page 0 | page 1 | ... ]                                     a page: (tokens, 1, latent_dim)

Page 0 is SGLang's: padding is written there. The daemon never grants it. A model that has layers with windows beside
others has two pools of SGLang's, whose numbers of layers and of pages differ. They are two groups, each with a slab.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from cachesvc_client import DaemonUnavailable
from cachesvc_client.plugins.facts import display_name, named
from cachesvc_client.plugins.node import RESERVED_PAGES, Node, Share, new_instance
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc_sglang.identity import engine_facts, replaced_weights
from cachesvc_sglang.links import FollowerLinks, LeaderLink
from cachesvc_sglang.plain import EngineRefused, ranks_of_engine
from cachesvc_sglang.refusals import LATENT_POOL, require_pool, require_window_pool
from cachesvc_sglang.settings import EngineSettings, flags_of, read_settings

GROUP, WINDOW_GROUP = "full", "window"

log = logging.getLogger("sglang.srt." + __name__)


class PoolMemory:
    """The daemon's side of a KV pool: what ``lay_over_slab`` leaves there for the cache. ``settings``: as read at the
    start. ``replaced``: why the weights that were loaded may not be those of the model's name; empty where they are.
    ``followers`` or ``leader``: links to the other ranks of the engine; neither for an engine of one rank."""

    def __init__(
        self,
        node: Node,
        settings: EngineSettings,
        replaced: str,
        followers: FollowerLinks | None = None,
        leader: LeaderLink | None = None,
    ) -> None:
        self.node = node
        self.settings = settings
        self.replaced = replaced
        self.followers = followers
        self.leader = leader


class PoolPart(NamedTuple):
    """A pool of SGLang's, a group of the layout: ``layers`` of the model. ``window_tokens``: that a token reads, its
    own included; None: all."""

    pool: Any
    group: str
    layers: Sequence[int]
    window_tokens: int | None = None

    @property
    def pages(self) -> int:
        return int(self.pool.size // self.pool.page_size + RESERVED_PAGES)


class WindowPoolPart(MHATokenToKVPool):  # type: ignore[misc]
    """A part of SGLang's pool with windows. Its buffers have no memory until ``lay_over``: one layout has all parts,
    and SGLang makes one after another."""

    _take_planes: Callable[[], None] | None = None

    def lay_over(self, take_planes: Callable[[], None]) -> None:
        """Have buffers in memory, which ``take_planes`` gives the pool."""
        self._take_planes = take_planes
        self._create_buffers()

    def _create_buffers_normal(self) -> None:
        if self._take_planes is not None:
            self._take_planes()
            return
        for name, shape in zip(_shapes(self), self._kv_buffer_shapes(), strict=True):
            empty = [torch.empty(shape, dtype=self.store_dtype, device="meta") for _ in range(self.layer_num)]
            setattr(self, f"{name}_buffer", empty)


def lay_over_slab(pool: Any) -> None:
    """Register a pool of whole sequences, map it, and give it its planes. Raises EngineRefused, and what registering
    raises."""
    require_pool(pool)
    part = PoolPart(pool, GROUP, range(pool.layer_num))
    take_planes(pool, part, _lay_over_slabs(pool, [part]))


def lay_over_slabs(pool: Any, window: int) -> None:
    """The same for a pool with layers that read ``window`` tokens before the query's. Its parts are
    ``WindowPoolPart``."""
    require_window_pool(pool)
    layers: dict[bool, list[int]] = {False: [], True: []}
    for layer, (_, has_window) in sorted(pool.layers_mapping.items()):
        layers[has_window].append(layer)
    parts = [
        PoolPart(pool.full_kv_pool, GROUP, layers[False]),
        PoolPart(pool.swa_kv_pool, WINDOW_GROUP, layers[True], window + 1),
    ]
    node = _lay_over_slabs(pool, parts)
    for part in parts:
        part.pool.lay_over(partial(take_planes, part.pool, part, node))


def _lay_over_slabs(pool: Any, parts: Sequence[PoolPart]) -> Node:
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.runtime_context import get_server_args

    settings, arguments = read_settings(os.environ), get_server_args()
    model_config = model_config_of(arguments)
    ranks = ranks_of_engine()
    layout = pool_layout(parts, ranks.size)
    shown = display_name(arguments.model_path)
    pages = tuple(part.pages for part in parts)

    def of_this_rank() -> tuple[tuple[str, ...], str, str, str]:
        if not ranks.is_first:
            return _devices(), "", "", replaced_weights(arguments, settings.model)
        facts = engine_facts(arguments, model_config, layout, settings.model)
        model = named("sglang", facts)
        log.info("shares_as model=%s name=%s facts=%s", model, shown, facts)
        replaced = replaced_weights(arguments, settings.model)
        return _devices(), model, new_instance(f"sglang-{os.getpid()}"), replaced

    starts = ranks.all(of_this_rank)
    (_, model, instance, _), *_ = starts
    replaced = next((each[-1] for each in starts if each[-1]), "")
    devices = tuple(each for start in starts for each in start[0])
    longest = -(-model_config.context_len // pool.page_size)
    share = Share(model, layout, pages[0], devices, shown, longest, group_pages=pages)
    flags = flags_of(pool.page_size)
    node = Node(settings, instance, share, flags=flags, attaches=True, keeps=ranks.is_first, rank=ranks.rank)
    try:
        ranks.all(node.start)
        node.comes_back = all(node.pool.memory(part.group).can_map_over for part in parts)
        node.keep_address()
        pool.cachesvc = PoolMemory(node, settings, replaced, *ranks.connect())
        return node
    except DaemonUnavailable as gone:
        node.close()
        raise EngineRefused(f"no cachesvcd answers at {node.socket_path} ({gone}): start it first") from gone
    except BaseException:
        node.close()
        raise


def pool_layout(parts: Sequence[PoolPart], ranks: int = 1) -> Layout:
    """Layout of SGLang's pools: K and V of each layer, or its latents, token by token. ``ranks``: of the engine, each
    of which has its own heads, or all latents."""
    groups, planes = [], []
    for pool, group, layers, window_tokens in parts:
        dtype = str(pool.store_dtype).removeprefix("torch.")
        is_replicated = ranks > 1 and type(pool).__name__ == LATENT_POOL
        groups.append(PlaneGroup(group, window_tokens, replicated=is_replicated))
        planes += [
            Plane(name, layer, group, (pool.page_size, *shape), dtype)
            for layer in layers
            for name, shape in _shapes(pool).items()
        ]
    return Layout(parts[0].pool.page_size, ranks, tuple(groups), tuple(planes))


def take_planes(pool: Any, part: PoolPart, node: Node) -> None:
    """Give a pool its planes of the slab."""
    rows = pool.size + pool.page_size
    for name in _shapes(pool):
        setattr(pool, f"{name}_buffer", [_rows(node, layer, name)[:rows] for layer in part.layers])


def _shapes(pool: Any) -> dict[str, tuple[int, int]]:
    """Shape of a token in each plane of a layer. SGLang's pool keeps plane ``k`` in ``k_buffer``."""
    if type(pool).__name__ == LATENT_POOL:
        return {"kv": (1, pool.kv_cache_dim)}
    return {"k": (pool.head_num, pool.head_dim), "v": (pool.head_num, pool.v_head_dim)}


def _rows(node: Node, layer: int, name: str) -> Any:
    plane = node.pool.to_torch(layer, name)
    return plane.view(-1, *plane.shape[2:])


def _devices() -> tuple[str, ...]:
    """UUID of this process's GPU; none without one."""
    if not torch.cuda.is_available():
        return ()
    return (f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}",)
