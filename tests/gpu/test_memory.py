"""Device memory: zeroed, shared with other processes, and never with a neighbour's bytes."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
from contextlib import ExitStack

import numpy as np
import pytest

from gpu_ops.driver import CudaMissing, CudaOutOfMemory
from gpu_ops.gpu import Gpu, driver_version, find_gpus, gpu_by_uuid
from gpu_ops.memory import ALLOCATION_BYTES, DeviceMemory
from tests.e2e.remote import ROOT
from tests.gpu.rig import allocated, write_device

pytestmark = pytest.mark.gpu

PEER_SECONDS = 60.0
WAYS = pytest.mark.parametrize("vmm", [False, True], ids=["ipc", "vmm"])


def digest_in_another_process(gpu: Gpu, memory: DeviceMemory, size_bytes: int) -> str:
    """Digest in a peer process, which then inverts every bit of it."""
    request = {"uuid": gpu.uuid, "size_bytes": size_bytes}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        if memory.fd is None:
            request["handle"] = memory.handle.hex()
        else:
            request["socket"] = theirs.fileno()
            socket.send_fds(ours, [b"\0"], [memory.fd])
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu.peer", json.dumps(request)],
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            text=True,
            timeout=PEER_SECONDS,
            check=True,
        )
    return done.stdout.strip()


def test_gpus_have_their_names_everywhere(gpu: Gpu) -> None:
    assert gpu.uuid.startswith("GPU-")
    assert len(gpu.uuid) == len("GPU-") + 36
    assert gpu_by_uuid(gpu.uuid).facts == find_gpus()[gpu.facts.ordinal].facts == gpu.facts
    assert driver_version() >= (12, 0)
    assert gpu.facts.compute >= (7, 0)
    with pytest.raises(CudaMissing, match=f"GPU-none is not visible to this process; it sees {gpu.uuid}"):
        gpu_by_uuid("GPU-none")


@WAYS
def test_another_process_sees_the_bytes_and_writes_are_seen_back(gpu: Gpu, rng: np.random.Generator, vmm: bool) -> None:
    with allocated(gpu, (5 << 20) + 1, vmm=vmm) as memory:
        assert (len(memory.handle), memory.fd is None) == ((0, False) if vmm else (64, True))
        given = rng.integers(0, 256, memory.size_bytes, np.uint8)
        write_device(gpu, memory.address, given.tobytes())
        assert digest_in_another_process(gpu, memory, memory.size_bytes) == hashlib.sha256(given.tobytes()).hexdigest()
        assert gpu.read(memory.address, memory.size_bytes) == np.bitwise_not(given).tobytes()


@WAYS
def test_a_handle_shows_no_neighbours_bytes(gpu: Gpu, vmm: bool) -> None:
    with ExitStack() as stack:
        small = [stack.enter_context(allocated(gpu, 4096, vmm=vmm)) for _ in range(8)]
        assert {one.size_bytes % ALLOCATION_BYTES for one in small} == {0}
        places = sorted(one.address for one in small)
        assert min(np.diff(places)) >= ALLOCATION_BYTES
        if not vmm:
            assert len({one.handle for one in small}) == len(small)
        for number, one in enumerate(small, start=1):
            write_device(gpu, one.address, bytes([number]) * one.size_bytes)
        middle = small[3]
        own = hashlib.sha256(b"\4" * middle.size_bytes).hexdigest()
        assert digest_in_another_process(gpu, middle, middle.size_bytes) == own
        for number, one in enumerate(small, start=1):
            turned = 0xFF - number if one is middle else number
            assert gpu.read(one.address, one.size_bytes) == bytes([turned]) * one.size_bytes


@WAYS
def test_memory_is_zeroed_even_where_other_memory_lay(gpu: Gpu, vmm: bool) -> None:
    size = 256 << 20
    for _ in range(3):
        with allocated(gpu, size, vmm=vmm) as memory:
            assert not np.frombuffer(gpu.read(memory.address, size), np.uint8).any()
            write_device(gpu, memory.address, b"\xff" * size)


@WAYS
def test_memory_that_is_not_there_is_a_typed_error_and_costs_nothing(gpu: Gpu, vmm: bool) -> None:
    with allocated(gpu, 4096, vmm=vmm):
        before = gpu.free_bytes()
        with pytest.raises(CudaOutOfMemory) as refused:
            gpu.allocate(2 * gpu.facts.total_bytes, vmm=vmm)
        assert isinstance(refused.value, MemoryError)
        assert gpu.free_bytes() > before - (16 << 30), "others may use the GPU meanwhile"


@WAYS
def test_what_is_given_back_can_be_had_again(gpu: Gpu, vmm: bool) -> None:
    before = gpu.free_bytes()
    for _ in range(32):
        with allocated(gpu, 1 << 30, vmm=vmm):
            pass
    assert gpu.free_bytes() > before - (16 << 30), "half of it, for others may use the GPU meanwhile"
