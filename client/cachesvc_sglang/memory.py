"""KV memory of an engine: SGLang's buffers are planes of the daemon's slab, and its page ids are the daemon's.

    layer l    k  [ page 0 | page 1 | ... ]    v  [ page 0 | page 1 | ... ]     a page: (tokens, heads, head_dim)
    latents    kv [ page 0 | page 1 | ... ]                                     a page: (tokens, 1, latent_dim)

Page 0 is SGLang's: padding is written there. The daemon never grants it.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from cachesvc_client import DaemonUnavailable
from cachesvc_client.plugins.facts import display_name, named
from cachesvc_client.plugins.node import RESERVED_PAGES, Node, Share, new_instance

from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc_sglang.identity import engine_facts, replaced_weights
from cachesvc_sglang.links import FollowerLinks, LeaderLink
from cachesvc_sglang.plain import EngineRefused, ranks_of_engine
from cachesvc_sglang.refusals import LATENT_POOL, require_pool
from cachesvc_sglang.settings import EngineSettings, flags_of, read_settings

GROUP = "full"

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


def lay_over_slab(pool: Any) -> None:
    """Register the engine's pool, map it, and give SGLang's pool its planes. Raises EngineRefused, and what
    registering raises."""
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.runtime_context import get_server_args

    settings, arguments = read_settings(os.environ), get_server_args()
    model_config = model_config_of(arguments)
    require_pool(pool)
    ranks = ranks_of_engine()
    layout = pool_layout(pool, ranks.size)
    shown = display_name(arguments.model_path)
    pages = pool.size // pool.page_size + RESERVED_PAGES

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
    share = Share(model, layout, pages, devices, shown, -(-model_config.context_len // pool.page_size))
    flags = flags_of(pool.page_size)
    node = Node(settings, instance, share, flags=flags, attaches=True, keeps=ranks.is_first, rank=ranks.rank)
    try:
        ranks.all(node.start)
        slab = node.pool.memory(GROUP)
        node.comes_back = slab.can_map_over
        node.keep_address()
        rows = pool.size + pool.page_size
        for name in _shapes(pool):
            setattr(pool, f"{name}_buffer", [_rows(node, layer, name)[:rows] for layer in range(pool.layer_num)])
        pool.cachesvc = PoolMemory(node, settings, replaced, *ranks.connect())
    except DaemonUnavailable as gone:
        node.close()
        raise EngineRefused(f"no cachesvcd answers at {node.socket_path} ({gone}): start it first") from gone
    except BaseException:
        node.close()
        raise


def pool_layout(pool: Any, ranks: int = 1) -> Layout:
    """Layout of SGLang's pool: K and V of each layer, or its latents, token by token. ``ranks``: of the engine, each of
    which has its own heads, or all latents."""
    dtype = str(pool.store_dtype).removeprefix("torch.")
    planes = [
        Plane(name, layer, GROUP, (pool.page_size, *shape), dtype)
        for layer in range(pool.layer_num)
        for name, shape in _shapes(pool).items()
    ]
    is_replicated = ranks > 1 and type(pool).__name__ == LATENT_POOL
    return Layout(pool.page_size, ranks, (PlaneGroup(GROUP, replicated=is_replicated),), tuple(planes))


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
