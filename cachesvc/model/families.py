"""Plane lists of the attention families that the client offers. The daemon never imports this file."""

from __future__ import annotations

from collections.abc import Sequence

from cachesvc.model.errors import LayoutRejected
from cachesvc.model.layout import Layout, Plane, PlaneGroup

FULL = "full"
WINDOW = "window"


def gqa(
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    block_tokens: int,
    dtype: str = "bfloat16",
    tensor_parallel: int = 1,
) -> Layout:
    """Grouped-query attention: planes ``k`` and ``v`` of ``[kv_heads / tp, block_tokens, head_dim]`` in each layer.

    Raises LayoutRejected when ``kv_heads`` does not divide by ``tensor_parallel``.
    """
    heads = heads_per_rank(kv_heads, tensor_parallel)
    shape = (heads, block_tokens, head_dim)
    planes = tuple(Plane(name, layer, FULL, shape, dtype) for layer in range(layers) for name in ("k", "v"))
    return Layout(block_tokens, tensor_parallel, (PlaneGroup(FULL),), planes)


def mla(
    *,
    layers: int,
    kv_lora_rank: int,
    rope_dim: int,
    block_tokens: int,
    dtype: str = "bfloat16",
    tensor_parallel: int = 1,
) -> Layout:
    """Multi-head latent attention: one plane ``latent`` of ``[1, block_tokens, kv_lora_rank + rope_dim]``, the same
    on every rank (DeepSeek-V3: 512 + 64, 73,728 bytes a block of 64 tokens in bf16)."""
    shape = (1, block_tokens, kv_lora_rank + rope_dim)
    planes = tuple(Plane("latent", layer, FULL, shape, dtype) for layer in range(layers))
    return Layout(block_tokens, tensor_parallel, (PlaneGroup(FULL, replicated=True),), planes)


def gqa_windowed(
    *,
    window_layers: Sequence[bool],
    kv_heads: int,
    head_dim: int,
    block_tokens: int,
    window_tokens: int,
    sink_tokens: int = 0,
    dtype: str = "bfloat16",
    tensor_parallel: int = 1,
) -> Layout:
    """GQA where ``window_layers[i]`` says whether layer i attends to the last ``window_tokens`` (and sinks) only."""
    heads = heads_per_rank(kv_heads, tensor_parallel)
    shape = (heads, block_tokens, head_dim)
    planes = tuple(
        Plane(name, layer, WINDOW if windowed else FULL, shape, dtype)
        for layer, windowed in enumerate(window_layers)
        for name in ("k", "v")
    )
    groups = (PlaneGroup(FULL), PlaneGroup(WINDOW, window_tokens, sink_tokens))
    return Layout(block_tokens, tensor_parallel, groups, planes)


def opaque(*, block_bytes: int, block_tokens: int, layers: int = 1) -> Layout:
    """Pages of plain bytes: ``layers`` planes ``bytes`` that share ``block_bytes``; for replay and storage tests.

    Raises LayoutRejected when ``block_bytes`` does not divide by ``layers``.
    """
    if layers < 1 or block_bytes % layers:
        raise LayoutRejected(f"block_bytes {block_bytes} must be a multiple of layers {layers}")
    planes = tuple(Plane("bytes", layer, FULL, (block_bytes // layers,), "uint8") for layer in range(layers))
    return Layout(block_tokens, 1, (PlaneGroup(FULL),), planes)


def heads_per_rank(kv_heads: int, tensor_parallel: int) -> int:
    """Key-value heads on each rank. Raises LayoutRejected where they do not divide."""
    if tensor_parallel < 1 or kv_heads < 1 or kv_heads % tensor_parallel:
        raise LayoutRejected(f"{kv_heads} kv heads do not divide over {tensor_parallel} ranks")
    return kv_heads // tensor_parallel
