"""Groups of vLLM's KV cache as data: which blocks of a group the token behind a hit needs.

vLLM divides a model's layers into groups of equally many. A group has a block table of its own, and all groups draw
their blocks from one pool. The daemon knows three kinds of them (``Retention``); everything else is refused by name.
Pages of all groups are equally large, so blocks of one group may have more tokens than those of another. The daemon's
have the least common multiple of all: vLLM's hits end there too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from cachesvc_client.plugins.daemon.errors import ConnectorRefused

from cachesvc.model.layout import MAX_BLOCK_TOKENS, MAX_GROUPS


class Retention(Enum):
    """FULL: all blocks, until the request ends. WINDOW: those of the last tokens. STATE: the last one alone."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"


FULL_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
WINDOW_SPECS = ("SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec")
STATE_SPECS = ("MambaSpec",)
UNIFORM_SPECS = "UniformTypeKVCacheSpecs"
"""A group whose layers have specs of one kind and pages of several sizes."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """``block_tokens``: of its own blocks. ``window_tokens``: of a WINDOW, the query's own included. ``replicated``:
    each rank computes all of it."""

    retention: Retention
    block_tokens: int
    window_tokens: int | None = None
    replicated: bool = False


def cache_groups(kv_cache_config: Any) -> tuple[CacheGroup, ...]:
    """Return vLLM's groups in its order. Raises ConnectorRefused for the first thing that cannot be served."""
    for why in _refusals(kv_cache_config):
        raise ConnectorRefused(f"cachesvc_vllm: {why}")
    return tuple(_group(each.kv_cache_spec) for each in kv_cache_config.kv_cache_groups)


def common_block_tokens(kv_cache_config: Any) -> int:
    """Return the tokens of a block in which each group has whole blocks."""
    return math.lcm(*(each.kv_cache_spec.block_size for each in kv_cache_config.kv_cache_groups))


def layer_specs(spec: Any) -> list[Any]:
    """Return the specs of a group's layers, each kind once."""
    return list(spec.kv_cache_specs.values()) if type(spec).__name__ == UNIFORM_SPECS else [spec]


def _group(spec: Any) -> CacheGroup:
    layers = layer_specs(spec)
    retention, replicated = _retention(layers[0]), all(map(_is_replicated, layers))
    assert retention is not None
    window = _window_tokens(layers[0]) if retention is Retention.WINDOW else None
    return CacheGroup(retention, int(spec.block_size), window, replicated)


def _retention(layer: Any) -> Retention | None:
    kinds = {Retention.FULL: FULL_SPECS, Retention.WINDOW: WINDOW_SPECS, Retention.STATE: STATE_SPECS}
    return next((kind for kind, names in kinds.items() if type(layer).__name__ in names), None)


def _window_tokens(layer: Any) -> int:
    """A chunk of local attention is a window as long as the chunk: it never reaches further back."""
    return int(layer.sliding_window if hasattr(layer, "sliding_window") else layer.attention_chunk_size)


def _is_replicated(layer: Any) -> bool:
    return getattr(layer, "max_tp_shards", None) == 1 or bool(getattr(layer, "tp_replicated", False))


def _refusals(kv_cache_config: Any) -> Iterable[str]:
    groups = [each.kv_cache_spec for each in kv_cache_config.kv_cache_groups]
    if not groups:
        yield "this model has no KV cache: leave the connector out"
    if len(groups) > MAX_GROUPS:
        yield f"this model has {len(groups)} KV cache groups, and {MAX_GROUPS} are supported: leave the connector out"
    for spec in groups:
        yield from _of_group(spec)
    if groups and not any(_retention(layer_specs(spec)[0]) is Retention.FULL for spec in groups):
        names = ", ".join(sorted({type(spec).__name__ for spec in groups}))
        yield f"no layer of this model keeps whole sequences ({names}), and one is needed: leave the connector out"
    if groups:
        yield from _of_sizes(groups, kv_cache_config.hash_block_size)


def _of_sizes(groups: list[Any], hashed: int | None) -> Iterable[str]:
    sizes = sorted({spec.block_size for spec in groups})
    if hashed is not None and any(size % hashed for size in sizes):
        yield f"keys are of {hashed} tokens and blocks of {sizes}: leave out --prefix-match-unit"
    if math.lcm(*sizes) > MAX_BLOCK_TOKENS:
        yield (
            f"KV cache groups with blocks of {sizes} tokens have {math.lcm(*sizes)} tokens in common, and at most "
            f"{MAX_BLOCK_TOKENS} are supported: take another --block-size"
        )
    has_states = any(_retention(layer) is Retention.STATE for spec in groups for layer in layer_specs(spec))
    if has_states and (len(sizes) > 1 or hashed not in (None, sizes[0])):
        yield (
            f"keys are of {hashed} tokens and blocks of {sizes}, and vLLM keeps states within a block then and goes on "
            "to write them: make all equal (--block-size, or leave out --prefix-match-unit)"
        )


def _of_group(spec: Any) -> Iterable[str]:
    layers, name = layer_specs(spec), type(spec).__name__
    kinds = {_retention(layer) for layer in layers}
    for layer in layers:
        if _retention(layer) is None:
            served = ", ".join((*FULL_SPECS, *WINDOW_SPECS, *STATE_SPECS))
            yield f"KV cache groups of {type(layer).__name__} are not supported; {served} are"
            return
    windows = {_window_tokens(layer) for layer in layers if _retention(layer) is Retention.WINDOW}
    if len(kinds) > 1 or len(windows) > 1:
        yield f"a KV cache group of {name} whose layers keep different blocks is not supported"
    if any(getattr(layer, "prefix_replay_tokens", 0) for layer in layers):
        yield f"KV cache groups of {name} that compute a part of each hit again are not supported"
    for layer in layers:
        if _retention(layer) is Retention.STATE:
            yield from _of_state(layer)


def _of_state(layer: Any) -> Iterable[str]:
    if layer.mamba_cache_mode != "align":
        yield (
            f"states in --mamba-cache-mode {layer.mamba_cache_mode} cannot be shared: leave that option out, so that "
            "vLLM keeps one at the end of each block (align)"
        )
    if layer.num_speculative_blocks:
        yield (
            "states of a model with speculative decoding are not supported, for drafts move them: leave out "
            "--speculative-config or the connector"
        )
