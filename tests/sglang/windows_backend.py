"""Attention over windows in plain torch, in the place of one that wants a GPU: SGLang has none for processors.

SGLang's own backend in plain torch masks windows, and writes their KV to the slots of the window pool; it reads them at
the slots of the other pool. So this one shows it each layer's own slots.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

NAME = "triton"
"""SGLang wants one of those that it knows to serve windows."""


class WindowsBackend(TorchNativeAttnBackend):  # type: ignore[misc]
    """``runner``: SGLang's ``ModelRunner``."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._rows = runner.req_to_token_pool

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a layer of a batch of prompts."""
        self._show(layer)
        return super().forward_extend(q, k, v, layer, *args, **kwargs)

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a layer of a batch of single tokens."""
        self._show(layer)
        return super().forward_decode(q, k, v, layer, *args, **kwargs)

    def _show(self, layer: Any) -> None:
        self.req_to_token_pool: Any = self._rows
        if self.use_sliding_window_kv_pool and self.token_to_kv_pool.layers_mapping[layer.layer_id][1]:
            slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(self._rows.req_to_token.long())
            self.req_to_token_pool = SimpleNamespace(req_to_token=slots)


register_attention_backend(NAME)(WindowsBackend)
