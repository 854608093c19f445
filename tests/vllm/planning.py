"""vLLM's own planner on the caches of published models. No model is made: specs are what vLLM's layers of these sizes
say. What the daemon's layout makes of each plan, ``tests/unit/vllm/daemon/test_vllm_plans.py`` holds.

    python -m tests.vllm.planning > tests/vllm/plans.jsonl

Prints a line of JSON for each plan, or for its refusal. 0.32 and 0.33 print the same. For another release than the
installed one, put its package before it on PYTHONPATH, with its ``dist-info``: only sources in Python are read.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)

from tests.vllm.rig import MODEL

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
except ImportError:  # 0.32
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

POOL_BYTES = 40 << 30
BFLOAT = torch.bfloat16


@dataclass(frozen=True)
class Attention:
    """Sizes of a model's attention layers. ``block``: tokens; raised where states are larger than its pages."""

    heads: int
    size: int
    block: int = 16

    def full(self) -> KVCacheSpec:
        """A layer that keeps whole sequences."""
        return FullAttentionSpec(block_size=self.block, num_kv_heads=self.heads, head_size=self.size, dtype=BFLOAT)

    def window(self, tokens: int) -> KVCacheSpec:
        """A layer with a window."""
        common = {"block_size": self.block, "num_kv_heads": self.heads, "head_size": self.size, "dtype": BFLOAT}
        return SlidingWindowSpec(**common, sliding_window=tokens)

    def chunk(self, tokens: int) -> KVCacheSpec:
        """A layer that sees chunks."""
        common = {"block_size": self.block, "num_kv_heads": self.heads, "head_size": self.size, "dtype": BFLOAT}
        return ChunkedLocalAttentionSpec(**common, attention_chunk_size=tokens)


def beside(state: MambaSpec, attention: Attention) -> tuple[MambaSpec, Attention]:
    """Raise the attention's block until its page is as large as a state, as vLLM's platforms do; else pad the state."""
    per_token = attention.full().page_size_bytes // attention.block
    block = max(attention.block, -(-state.page_size_bytes // (16 * per_token)) * 16)
    return replace(state, block_size=block, page_size_padded=block * per_token), replace(attention, block=block)


def state(*shapes: tuple[tuple[int, ...], Any], mode: str = "align", drafts: int = 0) -> MambaSpec:
    """Recurrent states of these shapes and dtypes."""
    return MambaSpec(
        block_size=16,
        shapes=tuple(shape for shape, _ in shapes),
        dtypes=tuple(dtype for _, dtype in shapes),
        mamba_cache_mode=mode,
        num_speculative_blocks=drafts,
    )


def mixed(count: int, every: int, full: KVCacheSpec, other: KVCacheSpec, first: int | None = None) -> dict[str, Any]:
    """Layers of which each ``every``-th one is full."""
    first = every - 1 if first is None else first
    return {f"model.layers.{each}": full if each % every == first else other for each in range(count)}


def hybrid(count: int, every: int, states: MambaSpec, attention: Attention, first: int | None = None) -> dict[str, Any]:
    """Layers of which each ``every``-th one is attention, and the others have states."""
    states, attention = beside(states, attention)
    return mixed(count, every, attention.full(), states, first)


def deepseek_v4(layers: int) -> dict[str, KVCacheSpec]:
    """Windows in each layer; behind the first two, compressed latents of 4 or 128 tokens, and what they are compressed
    from; for those of 4 an indexer too."""
    one = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": 576}
    packed = {"head_size": 512, "dtype": torch.uint8, "state_content_bytes": 584, "cache_dtype_str": "fp8_ds_mla"}
    found: dict[str, KVCacheSpec] = {}

    def keep(layer: int, ratio: int) -> None:
        spec = MLAAttentionSpec(block_size=256, tokens_per_state=ratio, **one, **packed, model_version="deepseek_v4")
        found[f"model.layers.{layer}.attn"] = spec

    def compress(name: str, ratio: int, size: int) -> None:
        reach = 2 * ratio if ratio == 4 else ratio
        found[name] = SlidingWindowMLASpec(
            block_size=4 if ratio == 4 else 8, head_size=size, dtype=torch.float32, sliding_window=reach, **one
        )

    for layer in range(layers):
        found[f"model.layers.{layer}.window"] = SlidingWindowMLASpec(
            block_size=64, sliding_window=128, **one, **packed, model_version="deepseek_v4"
        )
        if layer < 2:
            continue
        if layer % 2:
            keep(layer, 128)
            compress(f"model.layers.{layer}.compressor", 128, 2 * 512)
            continue
        keep(layer, 4)
        compress(f"model.layers.{layer}.compressor", 4, 4 * 512)
        compress(f"model.layers.{layer}.indexer.compressor", 4, 4 * 128)
        found[f"model.layers.{layer}.indexer"] = MLAAttentionSpec(
            block_size=256, tokens_per_state=4, head_size=132, dtype=torch.uint8, **one
        )
    return found


PACKED = {
    **dict.fromkeys(("int4_per_token_head", "int8_per_token_head", "fp8_per_token_head"), TritonAttentionBackend),
    **dict.fromkeys(("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_3bit_nc"), TurboQuantAttentionBackend),
}
"""Types of KV whose bytes a backend packs, scales included."""


def packed(dtype: str, attention: Attention) -> KVCacheSpec:
    """A layer that keeps whole sequences in one of these types, or in ``nvfp4``."""
    spec = replace(attention.full(), dtype=torch.uint8, kv_quant_mode=get_kv_quant_mode(dtype))
    if dtype in PACKED:
        return PACKED[dtype].customize_spec(spec)
    width = nvfp4_kv_cache_full_dim(attention.size)  # as FlashInfer's backend says, which is not installed
    return replace(spec, num_head_slots=2 * attention.heads, state_content_bytes=width)


def skipping(dtype: str, attention: Attention) -> dict[str, Any]:
    """Layers in a packed type, the first and the last two of which are not (``--kv-cache-dtype-skip-layers``): their
    pages are padded to the larger ones."""
    full, small = attention.full(), packed(dtype, attention)
    small = replace(small, page_size_padded=full.page_size_bytes)
    return {f"model.layers.{each}": full if each in (0, 1, 30, 31) else small for each in range(32)}


def models() -> dict[str, dict[str, KVCacheSpec]]:
    """Specs of each model's layers."""
    gdn = state(((3, 8192), BFLOAT), ((32, 128, 128), BFLOAT))
    gemma, oss, llama = Attention(16, 128), Attention(8, 64), Attention(8, 128)
    nemotron, _ = beside(state(((3, 10240), BFLOAT), ((128, 64, 128), torch.float32)), Attention(8, 128))
    wide = Attention(8, 128, nemotron.block_size)
    return {
        "Gemma 3 27B": mixed(62, 6, gemma.full(), gemma.window(1024)),
        "gpt-oss-120b": mixed(36, 2, oss.full(), oss.window(128)),
        "Qwen3-Next-80B": hybrid(48, 4, gdn, Attention(2, 256)),
        "Nemotron-H 8B": {
            **{f"model.layers.{each}.mixer": nemotron for each in range(24)},
            **{f"model.layers.{each}.attn": wide.full() for each in range(4)},
        },
        "Llama 4 Scout": mixed(48, 4, llama.full(), llama.chunk(8192)),
        "Jamba 1.5 mini": hybrid(32, 8, state(((3, 8192), BFLOAT), ((8192, 16), BFLOAT)), Attention(8, 128), 4),
        "LFM2 1.2B": hybrid(16, 3, state(((2, 2048), BFLOAT)), Attention(8, 64), 2),
        "Llama 3 8B": {f"model.layers.{each}": llama.full() for each in range(32)},
        **{
            f"Llama 3 8B in {dtype}": {f"model.layers.{each}": packed(dtype, llama) for each in range(32)}
            for dtype in (*PACKED, "nvfp4")
        },
        "Llama 3 8B in turboquant_4bit_nc but for four layers": skipping("turboquant_4bit_nc", llama),
        "Mistral 7B v0.1": {f"model.layers.{each}": llama.window(4096) for each in range(32)},
        "Gemma 4 31B": mixed(60, 6, Attention(4, 512).full(), Attention(16, 256).window(1024)),
        "Gemma 4 E4B": mixed(24, 6, Attention(2, 512).full(), Attention(2, 256).window(512)),
        "DeepSeek V4": deepseek_v4(43),
        "states that drafts move": hybrid(4, 4, replace(gdn, num_speculative_blocks=2), Attention(2, 256)),
        "states of mode all": hybrid(4, 4, replace(gdn, mamba_cache_mode="all"), Attention(2, 256)),
        "a ring for scratch": {
            **{f"model.layers.{each}": llama.full() for each in range(4)},
            "model.ring": CircularBufferSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=BFLOAT),
        },
        "cross attention": {
            **{f"model.layers.{each}": llama.full() for each in range(4)},
            "model.cross": CrossAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=BFLOAT),
        },
    }


def plan(config: Any, specs: dict[str, KVCacheSpec], layout_name: str) -> Any:
    """vLLM's plan for all of POOL_BYTES, and its keys."""
    config.cache_config.kv_cache_layout = layout_name
    config.cache_config.block_size = next(iter(specs.values())).block_size
    return get_kv_cache_config_from_groups(config, get_kv_cache_groups(config, specs), POOL_BYTES)


READ = (
    *("block_size", "sliding_window", "attention_chunk_size", "max_tp_shards", "tp_replicated", "mamba_cache_mode"),
    *("num_speculative_blocks", "prefix_replay_tokens"),
)
"""Fields that the connector reads of a layer's spec."""


def describe(config: Any, specs: dict[str, KVCacheSpec], layout_name: str) -> dict[str, Any]:
    """The plan as far as the connector reads it, with layers by number."""
    config.cache_config.num_gpu_blocks_override = None
    planned = plan(config, specs, layout_name)
    config.cache_config.num_gpu_blocks_override = planned.num_blocks // 256 * 256
    planned = plan(config, specs, layout_name)
    numbers = {name: number for number, name in enumerate(specs)}
    return {
        "num_blocks": planned.num_blocks,
        "hash_block_size": resolve_kv_cache_block_sizes(planned, config)[1],
        "tensors": [
            [each.size, each.layer_stride, each.block_stride, each.offset, [numbers[name] for name in each.layers]]
            for each in planned.kv_cache_tensors
        ],
        "groups": [
            {"layers": [numbers[name] for name in each.layer_names], "spec": _spec_facts(each.kv_cache_spec)}
            for each in planned.kv_cache_groups
        ],
    }


def _spec_facts(spec: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"kind": type(spec).__name__}
    facts |= {name: found for name in READ if (found := getattr(spec, name, None)) is not None}
    if hasattr(spec, "kv_cache_specs"):
        kinds: list[dict[str, Any]] = []
        for each in map(_spec_facts, spec.kv_cache_specs.values()):
            if each not in kinds:
                kinds.append(each)
        facts["specs"] = kinds
    return facts


def main() -> None:
    """Print the plans."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        config = EngineArgs(model=folder, skip_tokenizer_init=True, max_model_len=2048, enforce_eager=True)
        made = config.create_engine_config()
    for name, specs in models().items():
        for layout in ("LBHNC", "BLHNC"):
            found: dict[str, Any] = {"plan": f"{name}, {layout}"}
            try:
                found |= describe(made, specs, layout)
            except (AssertionError, ValueError, NotImplementedError) as refused:
                found["refused"] = str(refused)
            print(json.dumps(found))


if __name__ == "__main__":
    main()
