"""The next daemon's memory takes the place of the last one's on a GPU: what pointed there sees the new, unawares."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cachesvc_client import NotSupported

from cachesvc.model.layout import Layout, Plane, PlaneGroup
from tests.unit.rigs.client_gpu_rig import GpuRig
from tests.unit.rigs.client_rig import FakeDaemon

LAYOUT = Layout(4, 1, (PlaneGroup("full"),), (Plane("k", 0, "full", (2, 4, 8), "bfloat16"),))


def rigs(folder: Path, kind: str) -> tuple[GpuRig, GpuRig]:
    """Two daemons one after another, on one GPU."""
    made = []
    for name in ("first", "next"):
        (folder / name).mkdir()
        daemon = FakeDaemon(folder / name)
        daemon.start()
        made.append(GpuRig(daemon, LAYOUT, kind))
    made[1].gpu = made[0].gpu
    return made[0], made[1]


def end(*rigs: GpuRig) -> None:
    for rig in rigs:
        rig.life.close()
        rig.daemon.close()


def test_what_pointed_to_the_last_daemons_memory_sees_the_next_ones(tmp_path: Path) -> None:
    first, following = rigs(tmp_path, "cuda_fd")
    old, new = first.pool(), following.pool()
    assert old.memory("full").can_map_over
    tensor = old.planes[0, "k"]
    tensor[3] = 7
    first.daemon.hang_up()
    assert np.all(tensor[3] == 7), "what it had stays in reach until it has moved"
    new.memory("full").map_over(old.memory("full").address)
    assert not tensor[3].any()
    new.planes[0, "k"][5] = 9
    assert np.all(tensor[5] == 9)
    tensor[6] = 4
    assert np.all(new.planes[0, "k"][6] == 4)
    assert not old.close(), "the tensor is held"
    del tensor
    assert old.close()
    assert new.close()
    assert first.gpu.is_whole()
    end(first, following)


def test_what_is_mapped_by_a_legacy_handle_says_what_to_do(tmp_path: Path) -> None:
    first, following = rigs(tmp_path, "cuda_ipc")
    with first.pool() as old, following.pool() as new:
        assert not new.memory("full").can_map_over
        with pytest.raises(NotSupported, match="--device-memory vmm"):
            new.memory("full").map_over(old.memory("full").address)
    end(first, following)
