"""A model's layout out of its Hugging Face ``config.json``.

Defaults are taken only where transformers' own class has them and published configs rely on it; anything else that is
missing is an error, for a guessed size would share nothing and say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cachesvc.model.layout import Layout
from cachesvc_client.layouts.config_keys import (
    AUTO,
    ConfigKeyMissing,
    ConfigKeys,
    ConfigRejected,
    ConfigValueRejected,
    shortened,
)
from cachesvc_client.layouts.dtypes import dtype_name
from cachesvc_client.layouts.families import (
    IndexPage,
    dsa,
    gqa,
    gqa_head_windows,
    gqa_windowed,
    mla,
    mla_windowed,
    with_draft,
)
from cachesvc_client.layouts.states import STATE_MODELS, state_layout

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
    """Choices of the caller."""

    block_tokens: int
    tensor_parallel: int
    kv_dtype: str
    scale_dtype: str | None
    index_page: IndexPage
    heads: HeadWindows | None


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
    return _gqa_layers(keys, wish, kv_heads, _head_dim(keys), ())


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


def _ernie(keys: ConfigKeys, wish: _Wish) -> _Read:
    """ERNIE 4.5, dense and MoE."""
    return _gqa_layers(keys, wish, keys.number("num_key_value_heads"), _head_dim(keys), ())


def _qwen3(keys: ConfigKeys, wish: _Wish) -> _Read:
    """Qwen 3: layers from ``max_window_layers`` on have a window, where ``use_sliding_window`` is on."""
    layers = keys.number("num_hidden_layers")
    windows = keys.flags("layer_types", WINDOW_TYPES, layers)
    if windows is None and keys.find("use_sliding_window"):
        first = keys.number("max_window_layers")
        windows = tuple(layer >= first for layer in range(layers))
    return _gqa_layers(keys, wish, keys.number("num_key_value_heads"), _head_dim(keys), windows or ())


def _mistral(keys: ConfigKeys, wish: _Wish) -> _Read:
    """Mistral and Mixtral: all layers have a window where ``sliding_window`` is set, as in Mistral 7B 0.1."""
    layers = keys.number("num_hidden_layers")
    windows = (True,) * layers if keys.find_number("sliding_window") else ()
    return _gqa_layers(keys, wish, keys.number("num_key_value_heads"), _head_dim(keys), windows)


def _gemma3(keys: ConfigKeys, wish: _Wish) -> _Read:
    return _gemma3_text(keys.inner("text_config"), wish)


def _gemma3_text(keys: ConfigKeys, wish: _Wish) -> _Read:
    """Gemma 3: five local layers, then a global one. Defaults are Gemma3TextConfig's: the 4B leaves out the heads."""
    layers = keys.number("num_hidden_layers")
    windows = keys.flags("layer_types", WINDOW_TYPES, layers)
    if windows is None:
        pattern = keys.find_number("sliding_window_pattern") or keys.number("_sliding_window_pattern", 6)
        windows = tuple((layer + 1) % pattern != 0 for layer in range(layers))
    window_tokens = keys.number("sliding_window")
    kv_heads, head_dim = keys.number("num_key_value_heads", 4), keys.number("head_dim", 256)
    return _gqa_layers(keys, wish, kv_heads, head_dim, windows, layers=layers, window_tokens=window_tokens)


def _gpt_oss(keys: ConfigKeys, wish: _Wish) -> _Read:
    """gpt-oss. Its sinks are learned logits, one a head: no tokens, so nothing of them is cached. Its configs name no
    dtype: the experts are MXFP4, and attention is bfloat16."""
    windows = keys.flags("layer_types", WINDOW_TYPES, keys.number("num_hidden_layers"))
    if windows is None:
        raise ConfigKeyMissing("gpt_oss", "layer_types")
    kv_heads = keys.number("num_key_value_heads")
    return _gqa_layers(keys, wish, kv_heads, keys.number("head_dim"), windows, default_dtype="bfloat16")


def _deepseek(keys: ConfigKeys, wish: _Wish) -> _Read:
    """DeepSeek-V3, and what is V3 with an indexer. The indexer is looked for first: a DSA model has a latent too."""
    if keys.find("index_head_dim") is not None:
        return _deepseek_sparse(keys, wish)
    _refuse_scales(wish)
    layers = keys.number("num_hidden_layers")
    latent = {"kv_lora_rank": keys.number("kv_lora_rank"), "rope_dim": keys.number("qk_rope_head_dim")}
    shared = {"block_tokens": wish.block_tokens, "tensor_parallel": wish.tensor_parallel}
    dtype = keys.dtype(wish.kv_dtype)

    def full(count: int) -> Layout:
        return mla(layers=count, dtype=dtype, **latent, **shared)

    windows = _latent_windows(keys, layers)
    if not any(windows):
        return _Read(full(layers), full)
    window_tokens = keys.number("sliding_window")
    target = mla_windowed(window_layers=windows, window_tokens=window_tokens, dtype=dtype, **latent, **shared)
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
    rank, rope = keys.number("kv_lora_rank"), keys.number("qk_rope_head_dim")
    index = keys.number("index_head_dim")

    def full(count: int) -> Layout:
        return dsa(
            layers=count,
            kv_lora_rank=rank,
            rope_dim=rope,
            index_head_dim=index,
            block_tokens=wish.block_tokens,
            index_page=wish.index_page,
            tensor_parallel=wish.tensor_parallel,
        )

    return _Read(full(keys.number("num_hidden_layers")), full)


def _gqa_layers(
    keys: ConfigKeys,
    wish: _Wish,
    kv_heads: int,
    head_dim: int,
    windows: tuple[bool, ...],
    *,
    layers: int | None = None,
    window_tokens: int | None = None,
    default_dtype: str | None = None,
) -> _Read:
    dtype = keys.dtype(wish.kv_dtype, default_dtype)

    def full(count: int) -> Layout:
        return gqa(
            layers=count,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_tokens=wish.block_tokens,
            dtype=dtype,
            scale_dtype=wish.scale_dtype,
            tensor_parallel=wish.tensor_parallel,
        )

    layers = layers or keys.number("num_hidden_layers")
    if wish.heads is not None:
        _check_heads(wish.heads, layers, kv_heads, windows)
        target = gqa_head_windows(
            window_heads=wish.heads.marks,
            head_dim=head_dim,
            block_tokens=wish.block_tokens,
            window_tokens=wish.heads.window_tokens,
            sink_tokens=wish.heads.sink_tokens,
            dtype=dtype,
            scale_dtype=wish.scale_dtype,
            tensor_parallel=wish.tensor_parallel,
        )
        return _Read(target, full)
    if not any(windows):
        return _Read(full(layers), full)
    target = gqa_windowed(
        window_layers=windows,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=wish.block_tokens,
        window_tokens=window_tokens or keys.number("sliding_window"),
        dtype=dtype,
        scale_dtype=wish.scale_dtype,
        tensor_parallel=wish.tensor_parallel,
    )
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
    "ernie4_5": _ernie,
    "ernie4_5_moe": _ernie,
    "gemma3": _gemma3,
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
