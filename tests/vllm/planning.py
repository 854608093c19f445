"""vLLM's own planner on the caches of published models, and the daemon's layout for each plan. No model is made: specs
are what vLLM's layers of these sizes say.

    python -m tests.vllm.planning

Prints by model its groups, and the bytes that vLLM and the daemon take for the same number of blocks; or the refusal.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cachesvc_vllm.daemon.cache_groups import cache_groups
from cachesvc_vllm.daemon.errors import ConnectorRefused
from cachesvc_vllm.daemon.slab_layout import place_wider_first, slab_layout
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    resolve_kv_cache_block_sizes,
)
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
)

from cachesvc.model.geometry import device_bytes
from tests.vllm.rig import MODEL

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


def models() -> dict[str, dict[str, KVCacheSpec]]:
    """Specs of each model's layers."""
    gdn = state(((3, 8192), BFLOAT), ((32, 128, 128), BFLOAT))
    gemma, oss, llama = Attention(16, 128), Attention(8, 64), Attention(8, 128)
    nemotron, _ = beside(state(((3, 10240), BFLOAT), ((128, 64, 128), torch.float32)), Attention(8, 128))
    wide = Attention(8, 128, nemotron.block_size)
    gemma4 = {"block_size": 16, "num_kv_heads": 4, "head_size": 512, "dtype": BFLOAT}
    latents = {"block_size": 64, "num_kv_heads": 1, "dtype": BFLOAT}
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
        "Mistral 7B v0.1": {f"model.layers.{each}": llama.window(4096) for each in range(32)},
        "two sizes of heads": mixed(30, 6, FullAttentionSpec(**gemma4), Attention(16, 256).window(1024)),
        "DeepSeek V4": {
            **{f"model.layers.{each}.attn": MLAAttentionSpec(**latents, head_size=576) for each in range(4)},
            **{
                f"model.layers.{each}.window": SlidingWindowMLASpec(
                    block_size=8, num_kv_heads=1, head_size=576, dtype=BFLOAT, sliding_window=128
                )
                for each in range(4)
            },
        },
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


def describe(config: Any, specs: dict[str, KVCacheSpec], layout_name: str) -> dict[str, Any]:
    """The plan and the daemon's layout for it."""
    config.cache_config.num_gpu_blocks_override = None
    planned = plan(config, specs, layout_name)
    config.cache_config.num_gpu_blocks_override = planned.num_blocks // 256 * 256
    planned = plan(config, specs, layout_name)
    planned.hash_block_size = resolve_kv_cache_block_sizes(planned, config)[1]
    place_wider_first(planned)
    layout = slab_layout(planned)
    size = planned.kv_cache_tensors[0].size
    pages = (planned.num_blocks,) * len(layout.groups)
    return {
        "groups": [
            [each.retention.value, each.window_tokens, len(group.layer_names)]
            for each, group in zip(cache_groups(planned), planned.kv_cache_groups, strict=True)
        ],
        "block_tokens": layout.block_tokens,
        "blocks": planned.num_blocks,
        "vllm_bytes": size,
        "daemon_bytes": device_bytes(layout, pages),
        "planes": [len(layout.planes_of(group)) for group in range(len(layout.groups))],
    }


def main() -> None:
    """Print one line of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        config = EngineArgs(model=folder, skip_tokenizer_init=True, max_model_len=2048, enforce_eager=True)
        made = config.create_engine_config()
    found: dict[str, Any] = {}
    for name, specs in models().items():
        for layout in ("LBHNC", "BLHNC"):
            try:
                found[f"{name}, {layout}"] = describe(made, specs, layout)
            except (ConnectorRefused, ValueError, NotImplementedError) as refused:
                found[f"{name}, {layout}"] = {"refused": str(refused)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
