"""The memory of models: what cannot be made leaves nothing behind, and what was rounded up still gives way."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cachesvc.flows.core import Core
from cachesvc.flows.models import PoolWish, Registered, register
from cachesvc.ledger.ledger import Ledger
from cachesvc.memory.cuda import CudaBackend
from cachesvc.memory.host_pool import HostPool
from cachesvc.memory.seam import Backend
from cachesvc.memory.shm import ShmBackend
from cachesvc.model.errors import PoolExhausted, Unavailable
from cachesvc.model.geometry import device_bytes
from cachesvc.model.words import WritePolicy
from cachesvc.policy.eviction import lru
from cachesvc.policy.writing import WriteRule
from cachesvc.swap.engine import SwapEngine
from cachesvc.swap.planner_threads import InlinePlanning
from cachesvc.swap.vault import Vault
from tests.contracts.host_gpu import UNIT_BYTES, HostGpu
from tests.unit.ledger_rig import windowed

LAYOUT = windowed()
PAGES = (32, 32)
POOL_BYTES = device_bytes(LAYOUT, PAGES)


class Desk:
    """A core with real memory."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        backend.start()
        engine = SwapEngine(backend, lambda *_: None, planning=InlinePlanning())
        engine.start()
        self.core = Core(Ledger(), engine, lru, WriteRule(WritePolicy.WRITE_BACK))
        pool = HostPool(0, 1 << 20, 1, None, backend)
        self.vault = Vault(backend, pool, engine, lambda *_: None)

    def register(self, name: str) -> Registered:
        return register(self.core, self.vault, name, LAYOUT, b"", (), PoolWish(), PoolWish((0, 0)), 0.0)


def test_a_pool_whose_slabs_were_rounded_up_beyond_it_still_gives_way() -> None:
    gpu = HostGpu()
    desk = Desk(CudaBackend((gpu,), POOL_BYTES, vmm=True, timeline_words=64))
    desk.register("first")
    assert sum(slab.handle.size_bytes for slab in desk.vault.slabs(1, 0, 0)) == 2 * UNIT_BYTES > POOL_BYTES
    assert desk.vault.device_free_bytes(gpu.uuid) == 0
    second = desk.register("second")
    assert second.replica.device_pages == PAGES
    assert [model.name for model in desk.core.ledger.models.values()] == ["second"]
    desk.backend.close()
    assert gpu.is_whole()


def test_a_model_on_a_gpu_that_died_is_forgotten_whole() -> None:
    gpu = HostGpu()
    desk = Desk(CudaBackend((gpu,), POOL_BYTES, timeline_words=64))
    desk.register("first")
    gpu.is_dead = True
    with pytest.raises(Unavailable, match="restart the daemon"):
        desk.register("second")
    assert not desk.core.ledger.models
    assert desk.vault.device_free_bytes(gpu.uuid) == POOL_BYTES
    desk.backend.close()
    assert gpu.is_whole()


def test_a_slab_that_no_descriptor_is_left_for_leaves_no_model_behind() -> None:
    desk = Desk(ShmBackend(1, POOL_BYTES, timeline_words=64))
    with no_descriptors(), pytest.raises(Unavailable, match="ulimit -n"):
        desk.register("first")
    assert not desk.core.ledger.models
    assert desk.register("first").replica.device_pages == PAGES
    with pytest.raises(PoolExhausted):
        desk.backend.create_slab(desk.vault.devices()[0], 1)
    desk.backend.close()


@contextmanager
def no_descriptors() -> Iterator[None]:
    """The process may open nothing more for a while."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
