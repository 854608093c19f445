"""SGLang on the daemon's pages beside SGLang alone and its HiCache: ``python -m benchmarks.sglang --json OUT``.

Needs a GPU and SGLang in this Python. The same measurements of the same 8B Llama shape as ``benchmarks.vllm``, with
its parts: (a) a prompt that another process computed, beside an engine's own radix hit; (b) the same from the host
tier, beside HiCache; (c) throughput with nothing shared; (e) an engine killed and started again; (f) random requests on
two engines with kills, answer by answer against SGLang alone, and the daemon's check of all pages at the end.
"""

from __future__ import annotations

import os
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.vllm.comparison import GIB, Stage, beside, chaos, pair, perform, read_options
from benchmarks.vllm.engine import MODEL, TINY
from benchmarks.vllm.fleet import ROOT, Shape

CHUNK_TOKENS = 8192
"""Largest part of a prompt in one iteration."""


@dataclass(frozen=True)
class SglangShape(Shape):
    """Configuration that all SGLang engines of a run share. ``memory``: the part of free GPU memory that an engine may
    plan with."""

    memory: float = 0.8

    @property
    def engine(self) -> str:
        """Name of the engine's kind."""
        return "SGLang"

    @property
    def program(self) -> str:
        """Module that runs an engine."""
        return "benchmarks.sglang.engine"

    def environment(self) -> dict[str, str]:
        """Environment of an engine's process, in which SGLang finds the plugin by its entry point."""
        found = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(write_plugin(self.folder / "plugin")), os.environ["PYTHONPATH"]]),
            "HF_HUB_OFFLINE": "1",
            "PYTHONWARNINGS": "ignore",
        }
        return found if self.on_gpu else {**found, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}

    def wish(self, kind: str, address: str) -> dict[str, Any]:
        """Configuration message for an engine."""
        options: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "random_seed": 0,
            "page_size": self.block_tokens,
            "context_length": self.longest,
            "max_running_requests": self.sequences,
            "max_total_tokens": self.pool_tokens // self.block_tokens * self.block_tokens,
            "chunked_prefill_size": CHUNK_TOKENS,
            "mem_fraction_static": self.memory,
            "attention_backend": self.backend,
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_prefill_cuda_graph": True,
            "disable_cuda_graph": self.eager,
            "log_level": "info",
        }
        if not self.eager:
            options["cuda_graph_max_bs_decode"] = 64
        if not self.on_gpu:
            options["device"] = "cpu"
        if kind == "ours":
            options["radix_cache_backend"] = "cachesvc"
        if kind == "hicache":
            options |= {
                "enable_hierarchical_cache": True,
                "hicache_size": self.host_bytes // 10**9,
                "hicache_write_policy": "write_through",
            }
        return {"kind": kind, "address": address, "model": str(self.folder / "model"), "options": options}


def write_plugin(folder: Path) -> Path:
    """Write what an installer writes of the project's entry points, so that SGLang finds its plugin; the folder's
    path."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    notes = folder / "cachesvc-0.dist-info"
    notes.mkdir(parents=True, exist_ok=True)
    (notes / "METADATA").write_text("Metadata-Version: 2.1\nName: cachesvc\nVersion: 0\n", encoding="utf-8")
    lines = [
        line
        for group, found in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {at}" for name, at in found.items()))
    ]
    (notes / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def main() -> int:
    """Run the parts, in the order that starts engines seldom."""
    options = read_options("python -m benchmarks.sglang", __doc__, "abcef")
    options.model = "tiny" if options.tiny else "llama"
    shape = SglangShape(
        options.folder.resolve(),
        int(options.pool * GIB),
        int(options.host * GIB),
        model=TINY if options.tiny else MODEL,
        python=options.python,
        eager=options.tiny or not options.graphs,
        backend="torch_native" if options.tiny else options.backend or "triton",
        split=True,
        on_gpu=not options.tiny,
        memory=0.2 if options.tiny else 0.8,
    )
    stages = [
        Stage("ae", "", pair),
        Stage("ac", "plain", lambda run: beside(run, "plain", "plain")),
        Stage("b", "hicache", lambda run: beside(run, "hicache", "hicache")),
        Stage("f", "plain", chaos),
    ]
    return perform(options, shape, stages)


if __name__ == "__main__":
    sys.exit(main())
