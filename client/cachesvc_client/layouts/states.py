"""Models with recurrent states beside full attention, as vLLM keeps them: all groups draw equal pages from one pool.

vLLM raises the tokens of a block until a block of one attention layer is as large as one layer's state. It makes groups
of as many layers as the rarer kind has, so that a page of any group has the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cachesvc.model.layout import ITEM_BYTES, Layout, Plane, PlaneGroup
from cachesvc_client.layouts.config_keys import ConfigKeyMissing, ConfigKeys
from cachesvc_client.layouts.families import heads_per_rank

POOL = "kv"
GRAIN = 16
"""vLLM's attention kernels take blocks of a multiple of these tokens."""
MUCH_MORE = 1.5
"""Factor by which one kind has more layers than the other where groups are as small as the rarer kind."""


@dataclass(frozen=True, slots=True)
class StateModel:
    """Layers with KV or states, in order: True for a state. ``state_values``: shape and dtype of each part of a layer's
    state, of all ranks; the first dimension is divided among them. ``dtype`` None: the model's own."""

    layers: tuple[bool, ...]
    kv_heads: int
    head_dim: int
    state_values: tuple[tuple[tuple[int, ...], str | None], ...]

    def state_bytes(self, dtype: str, ranks: int) -> int:
        """Bytes of a layer's state on one rank. Raises LayoutRejected where its parts do not divide."""
        total = 0
        for (first, *others), own in self.state_values:
            values = heads_per_rank(first, ranks)
            for size in others:
                values *= size
            total += values * ITEM_BYTES[own or dtype]
        return total


def state_layout(model: StateModel, *, block_tokens: int, dtype: str, model_dtype: str, ranks: int) -> Layout:
    """Layout of the daemon for a model with states. ``dtype``: of keys and values; ``model_dtype``: of states that name
    none. Blocks have ``block_tokens`` or as many more as a state needs. Raises LayoutRejected."""
    token_bytes = 2 * heads_per_rank(model.kv_heads, ranks) * model.head_dim * ITEM_BYTES[dtype]
    state_bytes = model.state_bytes(model_dtype, ranks)
    tokens = max(block_tokens, -(-state_bytes // (GRAIN * token_bytes)) * GRAIN)
    kinds = [tuple(layer for layer, each in enumerate(model.layers) if each is kind) for kind in (True, False)]
    least, most = sorted(map(len, kinds))
    size = most if most < MUCH_MORE * least else least
    groups: list[PlaneGroup] = []
    planes: list[Plane] = []
    for is_state, layers in zip((True, False), kinds, strict=True):
        count = -(-len(layers) // size)
        for number in range(count):
            name = f"state-{number}" if is_state else ("full" if count == 1 else f"full-{number}")
            groups.append(PlaneGroup(name, pool=POOL, is_state=is_state))
            planes += [Plane("kv", layer, name, (tokens * token_bytes,), "uint8") for layer in layers[number::count]]
    return Layout(tokens, ranks, tuple(groups), tuple(planes))


def _qwen3_next(keys: ConfigKeys) -> StateModel:
    """Gated delta networks, and full attention in each ``full_attention_interval``-th layer."""
    layers = keys.number("num_hidden_layers")
    kinds = keys.flags("layer_types", {"full_attention": False, "linear_attention": True}, layers)
    if kinds is None:
        every = keys.number("full_attention_interval", 4)
        kinds = tuple((layer + 1) % every != 0 for layer in range(layers))
    key_heads, value_heads = keys.number("linear_num_key_heads"), keys.number("linear_num_value_heads")
    key_dim, value_dim = keys.number("linear_key_head_dim"), keys.number("linear_value_head_dim")
    width = 2 * key_heads * key_dim + value_heads * value_dim
    conv = ((width, keys.number("linear_conv_kernel_dim") - 1), None)
    state = ((value_heads, key_dim, value_dim), None)
    return StateModel(kinds, keys.number("num_key_value_heads"), keys.number("head_dim"), (conv, state))


def _nemotron_h(keys: ConfigKeys) -> StateModel:
    """Mamba 2 layers (M) and attention (*) by ``hybrid_override_pattern``; its feed-forward layers keep nothing."""
    pattern = keys.find("hybrid_override_pattern")
    if pattern is None:
        raise ConfigKeyMissing(keys.model_type, "hybrid_override_pattern")
    if not isinstance(pattern, str) or set(pattern) - set("M*-E") or not {"M", "*"} <= set(pattern):
        raise keys.rejected("hybrid_override_pattern", pattern, "text of M, *, - and E, with M and * in it")
    heads, head_dim = keys.number("mamba_num_heads"), keys.number("mamba_head_dim")
    state, groups = keys.number("ssm_state_size"), keys.number("n_groups")
    conv = ((heads * head_dim + 2 * groups * state, keys.number("conv_kernel") - 1), None)
    own = keys.find("mamba_ssm_cache_dtype") or "float32"
    size = keys.find_number("head_dim") or keys.number("attention_head_dim")
    kinds = tuple(kind == "M" for kind in pattern if kind in "M*")
    return StateModel(kinds, keys.number("num_key_value_heads"), size, (conv, ((heads, head_dim, state), str(own))))


def _jamba(keys: ConfigKeys) -> StateModel:
    """Mamba 1 layers, and attention in one layer of each period."""
    period, offset = keys.number("attn_layer_period"), keys.find_number("attn_layer_offset", least=0) or 0
    kinds = tuple(layer % period != offset for layer in range(keys.number("num_hidden_layers")))
    hidden = keys.number("hidden_size")
    width = hidden * keys.number("mamba_expand", 2)
    conv, state = ((width, keys.number("mamba_d_conv") - 1), None), ((width, keys.number("mamba_d_state")), None)
    head_dim = keys.find_number("head_dim") or hidden // keys.number("num_attention_heads")
    return StateModel(kinds, keys.number("num_key_value_heads"), head_dim, (conv, state))


def _lfm2(keys: ConfigKeys) -> StateModel:
    """Short convolutions, and full attention by ``layer_types``."""
    kinds = keys.flags("layer_types", {"full_attention": False, "conv": True}, keys.number("num_hidden_layers"))
    if kinds is None:
        raise ConfigKeyMissing(keys.model_type, "layer_types")
    hidden = keys.number("hidden_size")
    head_dim = keys.find_number("head_dim") or hidden // keys.number("num_attention_heads")
    conv = ((hidden, keys.number("conv_L_cache") - 1), None)
    return StateModel(kinds, keys.number("num_key_value_heads"), head_dim, (conv,))


STATE_MODELS: dict[str, Callable[[ConfigKeys], StateModel]] = {
    "jamba": _jamba,
    "lfm2": _lfm2,
    "nemotron_h": _nemotron_h,
    "qwen3_next": _qwen3_next,
}
"""Readers of configurations by model type."""
