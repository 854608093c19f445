"""Imports of each process with SGLang, and what its tests need of it: products that do not depend on a batch, and
pages that are wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from tests.sglang.stubs import install

MODULES = ("entrypoints.engine", "managers.scheduler", "models.registry")

PRODUCTS: tuple[tuple[Any, str], ...] = (
    *((torch.nn.functional, name) for name in ("linear", "scaled_dot_product_attention")),
    *((torch, name) for name in ("mm", "bmm", "matmul")),
)


def in_double(product: Callable[..., Any]) -> Callable[..., Any]:
    """Compute a product in double precision, and round it once.

    A CPU sums in an order that depends on how many rows there are. In bfloat16 an answer's last bits then depend on
    what else is in its batch, and on how much of its prompt was found. Summed in double precision they do not, so that
    answers can be compared bit by bit under weights by which a wrong page shows.
    """

    def exact(first: Any, *rest: Any, out: Any = None, **kwargs: Any) -> Any:
        result = product(_double(first), *map(_double, rest), **{name: _double(each) for name, each in kwargs.items()})
        return result.to(first.dtype) if out is None else out.copy_(result)

    return exact


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


BUFFERS = "k_buffer", "v_buffer", "kv_buffer"


def plant_wrong_pages(scheduler: Any) -> None:
    """Have each page hold what another one held, behind the daemon's back, of windows alone where there are any: SGLang
    calls it in each rank, by the name that ``collective_rpc`` is given."""
    pool, page_tokens = scheduler.token_to_kv_pool_allocator.get_kvcache(), scheduler.page_size
    pool = getattr(pool, "swa_kv_pool", pool)
    planes = [each for name in BUFFERS for each in getattr(pool, name, ())]
    order = torch.randperm(len(planes[0]) // page_tokens, generator=torch.Generator().manual_seed(1))
    for plane in planes:
        pages = plane.view(-1, page_tokens, *plane.shape[1:])
        pages.copy_(pages[order])


def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    """Make a tensor in plain memory: SGLang's adapters ask for pinned memory, and torch raises without a GPU."""

    def in_plain_memory(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return in_plain_memory


install()
for name in ("tensor", "empty", "zeros", "arange"):
    setattr(torch, name, unpinned(getattr(torch, name)))
torch.Tensor.pin_memory = lambda tensor, *_: tensor
for module, name in PRODUCTS:
    setattr(module, name, in_double(getattr(module, name)))
for name in MODULES:
    import_module(f"sglang.srt.{name}")
import_module("tests.sglang.windows_backend")
scheduler_module: Any = import_module("sglang.srt.managers.scheduler")
scheduler_module.Scheduler.plant_wrong_pages = plant_wrong_pages
