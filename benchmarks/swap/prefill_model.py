"""The compute of an 8B transformer's prefill over paged KV: real sizes, random weights, one layer's for all layers.

Hidden 4096, 32 query heads, 8 kv heads of 128, MLP 14336, bf16. No rotary embedding: it would change no figure.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.swap.prefill_engine import BLOCK_TOKENS, VOCABULARY, BeforeLayer

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 32, 4096, 32, 8, 128, 14336
EPSILON = 1e-6


class PrefillModel:
    """``planes[layer]``: k and v ``[pages, KV_HEADS, BLOCK_TOKENS, HEAD_DIM]``, on the current stream."""

    def __init__(self, planes: list[tuple[Any, Any]]) -> None:
        self.planes = planes
        generator = torch.Generator("cuda").manual_seed(1)

        def weight(rows: int, columns: int) -> Any:
            drawn = torch.randn(rows, columns, generator=generator, device="cuda", dtype=torch.float32)
            return (drawn / rows**0.5).to(torch.bfloat16)

        self._embedding = weight(VOCABULARY, HIDDEN) * VOCABULARY**0.5
        self._q, self._o = weight(HIDDEN, HEADS * HEAD_DIM), weight(HEADS * HEAD_DIM, HIDDEN)
        self._kv = weight(HIDDEN, 2 * KV_HEADS * HEAD_DIM)
        self._up, self._down = weight(HIDDEN, 2 * MLP), weight(MLP, HIDDEN)

    def forward(self, tokens: Any, table: Any, first: int, before_layer: BeforeLayer) -> Any:
        """Hidden state of the last of ``tokens``, whose positions begin at ``first``; both multiples of a block.

        ``table``: pages of all blocks up to their end, int64 on the GPU. Writes the K and V of ``tokens``.
        """
        hidden = self._embedding[tokens]
        own = table[first // BLOCK_TOKENS :]
        for layer, (k_plane, v_plane) in enumerate(self.planes):
            before_layer(layer)
            normed = torch.nn.functional.rms_norm(hidden, (HIDDEN,), eps=EPSILON)
            k, v = (normed @ self._kv).view(-1, 2, KV_HEADS, HEAD_DIM).unbind(1)
            k_plane[own] = _as_pages(k)
            v_plane[own] = _as_pages(v)
            q = (normed @ self._q).view(1, -1, HEADS, HEAD_DIM).transpose(1, 2)
            attended = attend(q, _as_sequence(k_plane[table]), _as_sequence(v_plane[table]))
            hidden = hidden + attended.transpose(1, 2).reshape(-1, HEADS * HEAD_DIM) @ self._o
            normed = torch.nn.functional.rms_norm(hidden, (HIDDEN,), eps=EPSILON)
            gate, up = (normed @ self._up).chunk(2, dim=-1)
            hidden = hidden + (torch.nn.functional.silu(gate) * up) @ self._down
        return hidden[-1].clone()


def attend(q: Any, k: Any, v: Any) -> Any:
    """Causal attention ``[1, heads, tokens, dim]`` of the last tokens of a sequence, by the flash kernel.

    The kernel puts the diagonal at the end of the keys and shares kv heads among query heads by itself, both of which
    torch's public function would hide behind copies.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001 - see above
    return kernel(q, k, v, 0.0, True)[0]


def check_attend() -> None:
    """The kernel does what ``attend`` says. Raises AssertionError."""
    generator = torch.Generator("cuda").manual_seed(2)

    def drawn(heads: int, tokens: int) -> Any:
        shape = (1, heads, tokens, HEAD_DIM)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(torch.bfloat16)

    q, k, v = drawn(HEADS, 64), drawn(KV_HEADS, 320), drawn(KV_HEADS, 320)
    shared = [one.float().repeat_interleave(HEADS // KV_HEADS, dim=1) for one in (k, v)]
    scores = q.float() @ shared[0].transpose(2, 3) / HEAD_DIM**0.5
    allowed = torch.ones(64, 320, dtype=torch.bool, device="cuda").tril(320 - 64)
    wanted = scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ shared[1]
    error = (attend(q, k, v).float() - wanted).norm() / wanted.norm()
    assert float(error) < 1e-2, f"flash attention is off by {float(error):.2g}"


def _as_pages(one: Any) -> Any:
    return one.reshape(-1, BLOCK_TOKENS, KV_HEADS, HEAD_DIM).transpose(1, 2)


def _as_sequence(pages: Any) -> Any:
    return pages.transpose(0, 1).reshape(1, KV_HEADS, -1, HEAD_DIM)
