"""Worker side of the product for ``scheduling``: over the daemon's slab, without vLLM's runner and without a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from cachesvc_client.adapters.layer_waits import LayerWaits
from cachesvc_client.plugins.node import Node
from cachesvc_vllm.adapters import AdapterReport
from cachesvc_vllm.worker_side import PageCopier, WorkerSide


class LoadedAdapters:
    """In the place of the product's, of all ``stages`` of a pipeline. ``files``: what lies at each adapter's path now;
    ``memory``: what was loaded, by number."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self.files: dict[str, int] = {}
        self.memory: dict[int, int] = {}
        self._asked: Any = ()
        self._epoch = 0
        self._reported: Any = None

    def load(self, request: Any) -> int:
        """Load an adapter, as vLLM does for a request if it is not loaded. Return what is loaded."""
        return self.memory.setdefault(request.lora_int_id, self.files[request.lora_path])

    def begin_step(self, asked: Any, epoch: int) -> None:
        """Do the product's."""
        self._asked, self._epoch = asked, epoch

    def report(self) -> AdapterReport | None:
        """Do the product's."""
        asked, self._asked = self._asked, ()
        for each in asked:
            self.load(each)
        news = self._epoch, dict(self.memory)
        if news == self._reported and not asked:
            return None
        self._reported = news
        digests = {number: each.to_bytes(32, "little") for number, each in news[1].items()}
        return AdapterReport(self._epoch, dict.fromkeys(range(self._stages), digests))


class Worker(WorkerSide):
    """Worker side of the product, with a node that was made for it."""

    def __init__(self, node: Node, page_bytes: int, stages: int = 1) -> None:
        self._node: Node = node
        self.adapters: Any = LoadedAdapters(stages)
        self._loads: dict[str, Any] = {}
        self._may_wait = self._drafts = False
        self._told = None
        self._tells_blocks = len(node.share.parts) == 1
        self._early: dict[str, Any] = {}
        self._lacking: set[int] = set()
        self._layers, self._has_layer_calls = {"l0": 0}, True
        self._asked: set[str] = set()
        self._waits = LayerWaits(lambda: self._pool, lambda: None)
        node.start()
        node.keep_address()
        slab, pages = node.share.slabs[0], node.share.pages
        self.comes_back = node.comes_back = node.pool.memory(slab).can_map_over
        self.slots = node.pool.slab(slab)[: pages * page_bytes].view(np.uint64).reshape(pages, -1)
        self._copier = PageCopier(torch.from_numpy(self.slots.reshape(-1).view(np.int8)), node.share.layout, pages)

    def close(self) -> None:
        """Close like the product's, which has no array of ours."""
        del self.slots, self._copier
        self._node.close()
