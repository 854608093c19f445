"""A model's layout out of its Hugging Face ``config.json``.

Defaults are taken only where transformers' own class has them and published configs rely on it; anything else that is
missing is an error, for a guessed size would share nothing and say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cachesvc.model.errors import LayoutRejected
from cachesvc.model.layout import ITEM_BYTES, Layout, Plane, PlaneGroup
from cachesvc_client.layouts.families import (
    IndexPage,
    dsa,
    dtype_name,
    gqa,
    gqa_head_windows,
    gqa_windowed,
    heads_per_rank,
    mla,
    mla_windowed,
    with_draft,
)

AUTO = "auto"
MAX_NUMBER = 1 << 20


class ConfigRejected(LayoutRejected):
    """The configuration does not describe a layout that can be built."""


class ConfigKeyMissing(ConfigRejected):
    """A key that the model type needs is missing."""

    def __init__(self, model_type: str, key: str, why: str = "") -> None:
        super().__init__(f"config of {model_type} has no {key}" + (f": {why}" if why else ""))
        self.model_type = model_type
        self.key = key


class ConfigValueRejected(ConfigRejected):
    def __init__(self, model_type: str, key: str, value: object, wanted: str) -> None:
        super().__init__(f"config of {model_type}: {key} is {shortened(value)}, but must be {wanted}")
        self.model_type = model_type
        self.key = key
        self.value = value


class ConfigKeys:
    """The keys of one configuration, checked as they are read. ``null`` is as good as absent."""

    def __init__(self, model_type: str, config: Mapping[str, Any], outer: Mapping[str, Any] | None = None) -> None:
        self.model_type = model_type
        self._config = config
        self._outer = outer or {}

    def inner(self, key: str) -> ConfigKeys:
        value = self._config.get(key)
        if value is None:
            raise ConfigKeyMissing(self.model_type, key)
        if not isinstance(value, Mapping):
            raise self.rejected(key, value, "an object")
        return ConfigKeys(self.model_type, value, outer=self._config)

    def find(self, key: str) -> Any:
        """Unchecked value of a key; None where the key is absent."""
        return self._config.get(key)

    def find_number(self, key: str, *, least: int = 1) -> int | None:
        """A whole number of at least ``least``, or None where none stands."""
        value = self._config.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_NUMBER:
            raise self.rejected(key, value, f"a whole number in {least}..{MAX_NUMBER}")
        return value

    def number(self, key: str, default: int | None = None) -> int:
        """A positive number, or the default. Raises ConfigKeyMissing where there is neither."""
        value = self.find_number(key)
        if value is not None:
            return value
        if default is None:
            raise ConfigKeyMissing(self.model_type, key)
        return default

    def flags(self, key: str, meaning: Mapping[Any, bool], length: int) -> tuple[bool, ...] | None:
        """A list of ``length`` values, each translated by ``meaning``; None where it is absent."""
        values = self._config.get(key)
        if values is None:
            return None
        if not isinstance(values, list | tuple) or len(values) != length:
            raise self.rejected(key, values, f"a list with one entry for each of {length} layers")
        for value in values:
            if not isinstance(value, str | int) or value not in meaning:
                raise self.rejected(key, value, f"a list of {' and '.join(map(str, meaning))}")
        return tuple(meaning[value] for value in values)

    def dtype(self, wanted: str, default: str | None = None) -> str:
        """The dtype that the caller wants, or with ``auto`` the model's own."""
        if wanted != AUTO:
            return wanted
        for config in (self._config, self._outer):
            for key in ("dtype", "torch_dtype"):
                value = config.get(key)
                if value is not None:
                    try:
                        return dtype_name(value)
                    except LayoutRejected:
                        raise self.rejected(key, value, f"one of {', '.join(ITEM_BYTES)}") from None
        if default is None:
            raise ConfigKeyMissing(self.model_type, "dtype", "say what the cache holds by kv_dtype")
        return default

    def rejected(self, key: str, value: object, wanted: str) -> ConfigValueRejected:
        return ConfigValueRejected(self.model_type, key, value, wanted)


def shortened(value: object) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Models with recurrent states beside full attention, as vLLM keeps them: all groups draw equal pages from one pool.
#
# vLLM raises the tokens of a block until a block of one attention layer is as large as one layer's state. It makes
# groups of as many layers as the rarer kind has, so that a page of any group has the same bytes.

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


__all__ = [
    "AUTO",
    "ConfigKeyMissing",
    "ConfigRejected",
    "ConfigValueRejected",
    "HeadWindows",
    "UnknownModelType",
    "layout_of_config",
]

PLAIN_GQA = "gqa"
NOT_PLAIN = (
    "kv_lora_rank",
    "index_head_dim",
    "num_kv_shared_layers",
    "full_attention_interval",
    "hybrid_override_pattern",
    "layers_block_type",
    "attn_layer_period",
    "attn_type_list",
    "mamba_d_state",
    "ssm_cfg",
    "window_attn_skip_freq",
    "attention_chunk_size",
    "text_config",
)
"""Keys by which a configuration says that its layers are not all of one kind, or keep something else."""
PACKED_DTYPES = (AUTO, "uint8", "float8_e4m3fn")  # of layers whose rows are packed: nothing, or what they are
WINDOW_TYPES = {"full_attention": False, "sliding_attention": True}


class UnknownModelType(ConfigRejected):
    """``model_type`` is none that is known here. ``known``: those that are."""

    def __init__(self, model_type: object) -> None:
        self.model_type = model_type
        self.known = tuple(sorted(READERS))
        super().__init__(
            f"unknown model_type {shortened(model_type)}; known are {', '.join(self.known)}; where every layer is "
            f"plain grouped-query attention say assume={PLAIN_GQA!r} (--assume {PLAIN_GQA}), else build the layout "
            "with a function of cachesvc_client such as gqa_windowed or mla"
        )


@dataclass(frozen=True, slots=True)
class HeadWindows:
    """Kv heads with a window, as ``marks[layer][global kv head]``, and the window."""

    marks: Sequence[Sequence[bool]]
    window_tokens: int
    sink_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Wish:
    block_tokens: int
    tensor_parallel: int
    kv_dtype: str
    scale_dtype: str | None
    index_page: IndexPage
    heads: HeadWindows | None

    @property
    def sizes(self) -> dict[str, int]:
        return {"block_tokens": self.block_tokens, "tensor_parallel": self.tensor_parallel}


class _Read(NamedTuple):
    """The layers of the model itself, and how further full ones of the same kind are made."""

    target: Layout
    more_layers: Callable[[int], Layout]


def layout_of_config(
    config: Mapping[str, Any],
    *,
    block_tokens: int,
    tensor_parallel: int = 1,
    kv_dtype: object = AUTO,
    scale_dtype: object = None,
    mtp: bool = False,
    index_page: IndexPage = IndexPage.SPLIT,
    heads: HeadWindows | None = None,
    assume: str | None = None,
) -> Layout:
    """The layout of the model that ``config``, the contents of a ``config.json``, describes.

    ``kv_dtype``: ``auto`` for the model's own, or another such as ``fp8``; ``scale_dtype`` adds a scale for each head
    and token. ``mtp`` adds the model's next-token-prediction layers in groups of their own. ``heads``: windows head by
    head, which no configuration contains. ``assume="gqa"``: treat every layer of an unknown model type as plain
    grouped-query attention, by ``num_hidden_layers``, ``num_key_value_heads`` and ``head_dim``. It is refused where the
    configuration names windows or other kinds of layers; the caller must know whether it is complete. Raises
    UnknownModelType, ConfigKeyMissing, ConfigValueRejected, and LayoutRejected (also their base) for an impossible
    layout.
    """
    if assume not in (None, PLAIN_GQA):
        raise ConfigRejected(f"assume is {assume!r}, but can only be {PLAIN_GQA!r}")
    dtype = AUTO if kv_dtype == AUTO else dtype_name(kv_dtype)
    scales = None if scale_dtype is None else dtype_name(scale_dtype)
    wish = _Wish(block_tokens, tensor_parallel, dtype, scales, index_page, heads)
    model_type = config.get("model_type")
    reader = READERS.get(model_type) if isinstance(model_type, str) else None
    if reader is None and assume == PLAIN_GQA:
        reader = _plain
    if reader is None:
        raise UnknownModelType(model_type)
    keys = ConfigKeys(str(model_type), config)
    read = reader(keys, wish)
    if not mtp:
        return read.target
    drafts = keys.find_number("num_nextn_predict_layers", least=0)
    if not drafts:
        raise ConfigKeyMissing(keys.model_type, "num_nextn_predict_layers", "it names no MTP layers; leave mtp out")
    return with_draft(read.target, read.more_layers(drafts))


def _llama(keys: ConfigKeys, wish: _Wish) -> _Read:
    """Llama 3.1; without ``num_key_value_heads`` every query head has its own."""
    kv_heads = keys.find_number("num_key_value_heads") or keys.number("num_attention_heads")
    return _gqa_layers(keys, wish, kv_heads=kv_heads)


def _plain(keys: ConfigKeys, wish: _Wish) -> _Read:
    """Layout of an unknown model whose layers the caller declares to be plain grouped-query attention."""
    for key in NOT_PLAIN:
        value = keys.find(key)
        if value is not None:
            raise keys.rejected(key, value, f"absent for assume={PLAIN_GQA!r}: these layers are something else")
    windows = keys.flags("layer_types", WINDOW_TYPES, keys.number("num_hidden_layers")) or ()
    window_tokens = keys.find("sliding_window")
    if any(windows) or (window_tokens is not None and keys.find("use_sliding_window") is not False):
        raise keys.rejected("sliding_window", window_tokens, "off for assume='gqa': use gqa_windowed")
    return _llama(keys, wish)


def _qwen3(keys: ConfigKeys, wish: _Wish) -> _Read:
    """Qwen 3: layers from ``max_window_layers`` on have a window, where ``use_sliding_window`` is on."""
    layers = keys.number("num_hidden_layers")
    windows = keys.flags("layer_types", WINDOW_TYPES, layers)
    if windows is None and keys.find("use_sliding_window"):
        first = keys.number("max_window_layers")
        windows = tuple(layer >= first for layer in range(layers))
    return _gqa_layers(keys, wish, windows or ())


def _mistral(keys: ConfigKeys, wish: _Wish) -> _Read:
    """Mistral and Mixtral: all layers have a window where ``sliding_window`` is set, as in Mistral 7B 0.1."""
    layers = keys.number("num_hidden_layers")
    windows = (True,) * layers if keys.find_number("sliding_window") else ()
    return _gqa_layers(keys, wish, windows)


def _gemma3_text(keys: ConfigKeys, wish: _Wish) -> _Read:
    """Gemma 3: five local layers, then a global one. Defaults are Gemma3TextConfig's: the 4B leaves out the heads."""
    layers = keys.number("num_hidden_layers")
    windows = keys.flags("layer_types", WINDOW_TYPES, layers)
    if windows is None:
        pattern = keys.find_number("sliding_window_pattern") or keys.number("_sliding_window_pattern", 6)
        windows = tuple((layer + 1) % pattern != 0 for layer in range(layers))
    window_tokens = keys.number("sliding_window")
    kv_heads, head_dim = keys.number("num_key_value_heads", 4), keys.number("head_dim", 256)
    return _gqa_layers(keys, wish, windows, kv_heads=kv_heads, head_dim=head_dim, window_tokens=window_tokens)


def _gpt_oss(keys: ConfigKeys, wish: _Wish) -> _Read:
    """gpt-oss. Its sinks are learned logits, one a head: no tokens, so nothing of them is cached. Its configs name no
    dtype: the experts are MXFP4, and attention is bfloat16."""
    windows = keys.flags("layer_types", WINDOW_TYPES, keys.number("num_hidden_layers"))
    if windows is None:
        raise ConfigKeyMissing("gpt_oss", "layer_types")
    kv_heads = keys.number("num_key_value_heads")
    head_dim = keys.number("head_dim")
    return _gqa_layers(keys, wish, windows, kv_heads=kv_heads, head_dim=head_dim, default_dtype="bfloat16")


def _deepseek(keys: ConfigKeys, wish: _Wish) -> _Read:
    """DeepSeek-V3, and what is V3 with an indexer. The indexer is looked for first: a DSA model has a latent too."""
    if keys.find("index_head_dim") is not None:
        return _deepseek_sparse(keys, wish)
    _refuse_scales(wish)
    layers = keys.number("num_hidden_layers")
    latent = {"kv_lora_rank": keys.number("kv_lora_rank"), "rope_dim": keys.number("qk_rope_head_dim")}
    dtype = keys.dtype(wish.kv_dtype)

    def full(count: int) -> Layout:
        return mla(layers=count, dtype=dtype, **latent, **wish.sizes)

    windows = _latent_windows(keys, layers)
    if not any(windows):
        return _Read(full(layers), full)
    window_tokens = keys.number("sliding_window")
    target = mla_windowed(window_layers=windows, window_tokens=window_tokens, dtype=dtype, **latent, **wish.sizes)
    return _Read(target, full)


def _latent_windows(keys: ConfigKeys, layers: int) -> tuple[bool, ...]:
    """FastDeploy's list: 1 marks a layer with a window; MTP layers may be in it. (Elsewhere a *number* of that name
    means other things.)"""
    key, drafts = "window_attn_skip_freq", keys.find_number("num_nextn_predict_layers", least=0) or 0
    listed = keys.find(key)
    with_drafts = isinstance(listed, list) and len(listed) == layers + drafts
    windows = keys.flags(key, {0: False, 1: True}, layers + drafts if with_drafts else layers) or ()
    if any(windows[layers:]):
        raise keys.rejected(key, listed, "0 for MTP layers: a draft's prefix is matched by full layers")
    return windows[:layers]


def _deepseek_sparse(keys: ConfigKeys, wish: _Wish) -> _Read:
    """DeepSeek-V3.2: always packed rows, whatever the model's own dtype."""
    _refuse_scales(wish)
    if wish.kv_dtype not in PACKED_DTYPES:
        raise ConfigRejected(f"sparse attention keeps packed fp8 rows, not {wish.kv_dtype}: leave kv_dtype out")
    latent = {"kv_lora_rank": keys.number("kv_lora_rank"), "rope_dim": keys.number("qk_rope_head_dim")}
    index = keys.number("index_head_dim")

    def full(count: int) -> Layout:
        return dsa(layers=count, index_head_dim=index, index_page=wish.index_page, **latent, **wish.sizes)

    return _Read(full(keys.number("num_hidden_layers")), full)


def _gqa_layers(
    keys: ConfigKeys,
    wish: _Wish,
    windows: tuple[bool, ...] = (),
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    window_tokens: int | None = None,
    default_dtype: str | None = None,
) -> _Read:
    kv_heads = kv_heads or keys.number("num_key_value_heads")
    head_dim = head_dim or _head_dim(keys)
    shared: dict[str, Any] = {"head_dim": head_dim, "dtype": keys.dtype(wish.kv_dtype, default_dtype), **wish.sizes}
    shared["scale_dtype"] = wish.scale_dtype

    def full(count: int) -> Layout:
        return gqa(layers=count, kv_heads=kv_heads, **shared)

    layers = keys.number("num_hidden_layers")
    if (heads := wish.heads) is not None:
        _check_heads(heads, layers, kv_heads, windows)
        reach = {"window_tokens": heads.window_tokens, "sink_tokens": heads.sink_tokens}
        target = gqa_head_windows(window_heads=heads.marks, **reach, **shared)
    elif any(windows):
        shared_window = window_tokens or keys.number("sliding_window")
        target = gqa_windowed(window_layers=windows, kv_heads=kv_heads, window_tokens=shared_window, **shared)
    else:
        target = full(layers)
    return _Read(target, full)


def _check_heads(heads: HeadWindows, layers: int, kv_heads: int, windows: tuple[bool, ...]) -> None:
    if any(windows):
        raise ConfigRejected("the model's own layers have windows: head by head they cannot have others")
    if len(heads.marks) != layers or any(len(layer) != kv_heads for layer in heads.marks):
        raise ConfigRejected(f"windows head by head need {layers} layers of {kv_heads} kv heads")


def _head_dim(keys: ConfigKeys) -> int:
    found = keys.find_number("head_dim")
    if found is not None:
        return found
    hidden, heads = keys.number("hidden_size"), keys.number("num_attention_heads")
    if hidden % heads:
        raise keys.rejected("hidden_size", hidden, f"a multiple of {heads} heads, or come with a head_dim")
    return hidden // heads


def _refuse_scales(wish: _Wish, what: str = "latents") -> None:
    if wish.heads is not None:
        raise ConfigRejected(f"{what} have no windows head by head: leave them out")
    if wish.scale_dtype is not None:
        raise ConfigRejected(f"{what} have no scales of their own: leave scale_dtype out")


def _states(keys: ConfigKeys, wish: _Wish) -> _Read:
    """Recurrent states beside full attention, in one pool as vLLM has them."""
    _refuse_scales(wish, "states and what shares their pool")
    made = state_layout(
        STATE_MODELS[keys.model_type](keys),
        block_tokens=wish.block_tokens,
        dtype=keys.dtype(wish.kv_dtype),
        model_dtype=keys.dtype(AUTO, "bfloat16"),
        ranks=wish.tensor_parallel,
    )

    def refuse(_: int) -> Layout:
        raise ConfigRejected("states with next-token-prediction layers are not supported: leave mtp out")

    return _Read(made, refuse)


READERS: dict[str, Callable[[ConfigKeys, _Wish], _Read]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek_sparse,
    "ernie4_5": _gqa_layers,
    "ernie4_5_moe": _gqa_layers,
    "gemma3": lambda keys, wish: _gemma3_text(keys.inner("text_config"), wish),
    "gemma3_text": _gemma3_text,
    "gpt_oss": _gpt_oss,
    "granite": _llama,
    "kimi_k2": _deepseek,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mistral,
    "olmo2": _llama,
    "qwen2": _qwen3,
    "qwen2_moe": _qwen3,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3,
    **dict.fromkeys(STATE_MODELS, _states),
}
