"""Real SGLang engines over a real daemon on shared memory."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.sglang.comparison import write_plugin
from tests.forked_process import ROOT, Forker
from tests.vllm.rig import Engine, make_saved_fleet

PYTHON_VARIABLE = "CACHESVC_SGLANG_PYTHON"


@dataclass(frozen=True)
class SglangFleet:
    """Makes engines of one model, whose weights are in its folder."""

    folder: Path
    forker: Forker

    def engine(
        self,
        socket_path: str | None,
        blocks: int = 256,
        *,
        extra: Mapping[str, Any] | None = None,
        variables: Mapping[str, str] | None = None,
        **wish: Any,
    ) -> Engine:
        """An engine that starts. ``socket_path``: of its daemon, None: plain SGLang. ``variables``: of its
        environment."""
        wished = {
            "model": str(self.folder),
            "blocks": blocks,
            "cachesvc": socket_path is not None,
            "log": "",
            **wish,
        }
        mine = {"CACHESVC_SOCKET": socket_path or "", "CACHESVC_SGLANG": json.dumps(extra or {}), **(variables or {})}
        return Engine(self.forker.start("tests.sglang.engine_process", json.dumps(wished), variables=mine))


@cache
def forker() -> Forker:
    """Forks processes with SGLang, which finds the product's plugin."""
    plugin = Path(tempfile.mkdtemp(prefix="plugin-"))
    atexit.register(shutil.rmtree, plugin)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            map(str, [write_plugin(plugin), *(ROOT / each for each in (".", "client", "proto/gen"))])
        ),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCHDYNAMO_DISABLE": "1",  # a rank of several compiles a function of SGLang's at its first request: 9 s
    }
    return Forker(os.environ[PYTHON_VARIABLE], "tests.sglang.preload", environment)


def make_fleet(folder: Path) -> SglangFleet:
    """Engines of a model of saved weights, which are large enough that a wrong page changes the answer."""
    make_saved_fleet(folder)
    return SglangFleet(folder, forker())
