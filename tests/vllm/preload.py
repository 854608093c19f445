"""Imports of each process with vLLM, and how such a process starts others: forked, for an import takes ten seconds.
And dummy weights by which a wrong page shows."""

import itertools
import multiprocessing
import os
from importlib import import_module
from typing import Any

import torch

MODULES = ("entrypoints.llm", "v1.engine.core", "v1.engine.llm_engine", "v1.worker.cpu_worker")

system_utils: Any = import_module("vllm.utils.system_utils")
system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")

for module in MODULES:
    import_module(f"vllm.{module}")


WEIGHT_SCALE, SCALE_VARIABLE = 0.08, "CACHESVC_TEST_WEIGHT_SCALE"
"""vLLM's dummy weights are within 0.001 of zero, by which what is cached hardly counts: answers from wrong pages are
equal to the last bit. With these a wrong page shows (``Engine.plant_wrong_pages``)."""

_filled = itertools.count(1000)


def fill_lively(tensor: Any, *_: Any, **__: Any) -> None:
    """Do ``initialize_single_dummy_weight``: with the same values in each process, as one loads the same model."""
    if tensor.device.type == "meta" or not torch.is_floating_point(tensor):
        return
    if (value := getattr(tensor, "dummy_weight_value", None)) is not None:
        tensor.fill_(value)
        return
    scale = float(os.environ.get(SCALE_VARIABLE, WEIGHT_SCALE))
    low, high = (-scale, scale) if tensor.dim() > 1 else (0.3, 1.0)
    values = torch.empty(tensor.shape, dtype=torch.float32)
    values.uniform_(low, high, generator=torch.Generator().manual_seed(next(_filled)))
    with torch.no_grad():
        tensor.copy_(values)


def load_lively(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Do ``DummyModelLoader.load_weights``; states keep most of what they have from one token to the next."""
    load(self, model, *args, **kwargs)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (value := DECAYS.get(name.rpartition(".")[2])) is not None:
                parameter.fill_(value)


DECAYS = {"A_log": -5.0, "A": -0.01, "dt_bias": -1.0}

loader: Any = import_module("vllm.model_executor.model_loader.dummy_loader")
load = loader.DummyModelLoader.load_weights
loader.initialize_single_dummy_weight = fill_lively
loader.DummyModelLoader.load_weights = load_lively


def receive_eagerly(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Do ``sync_and_gather_intermediate_tensors``: the tensors that a later stage of a pipeline receives into are made
    in the first warm-up, and vLLM for processors has none where nothing is compiled."""
    if self.intermediate_tensors is None:
        self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
            batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
        )
    return receive(self, *args, **kwargs)


runner: Any = import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
receive = runner.sync_and_gather_intermediate_tensors
runner.sync_and_gather_intermediate_tensors = receive_eagerly
