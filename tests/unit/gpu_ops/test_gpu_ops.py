"""Parts of ``gpu_ops`` that need no GPU: structures byte by byte, rounding, refusals, and the oracle of its kernels."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest

from gpu_ops.driver import (
    LIBRARY,
    Copy2D,
    CopyAttributes,
    CudaError,
    CudaMissing,
    CudaOutOfMemory,
    Driver,
    IpcHandle,
    WordOperation,
    driver,
)
from gpu_ops.gpu import Gpu, GpuFacts, find_gpus
from gpu_ops.kernels.pages import stamps
from gpu_ops.kernels.reference import count_wrong, page_bytes
from gpu_ops.memory import rounded
from gpu_ops.streams import BATCH_ENTRY, BatchEntries

HOST, DEVICE = 0x7F00_1234_5000, 0x30_2000_0000
SPLITMIX64_OF_0 = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
"""The first words of the published generator for seed 0."""


def has_driver() -> bool:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def test_a_batch_entry_is_the_drivers_structure() -> None:
    copies = np.array([(HOST, DEVICE, 41_984, 61, 2_560_000, 1 << 30), (DEVICE, HOST, 1, 1, 1, 1)], np.int64)
    entries = BatchEntries(3)
    entries.fill(np.full((3, 6), -1))
    address = entries.fill(copies)
    first, second = (entry.tobytes() for entry in entries.filled(2))
    assert ctypes.string_at(address, 2 * len(first)) == first + second
    assert BATCH_ENTRY.itemsize == len(first) == len(second) == 112
    # A CUmemcpy3DOperand is {type, pad, ptr, rowLength, layerHeight, location type, location id}.
    assert struct.unpack_from("<IIQQQIi", first, 0) == (1, 0, HOST, 2_560_000, 0, 0, 0)
    assert struct.unpack_from("<IIQQQIi", first, 40) == (1, 0, DEVICE, 1 << 30, 0, 0, 0)
    assert struct.unpack_from("<QQQII", first, 80) == (41_984, 61, 1, 1, 1)
    assert struct.unpack_from("<Q", second, 8) == (DEVICE,)
    assert struct.unpack_from("<Q", second, 48) == (HOST,)
    assert BATCH_ENTRY.fields is not None
    offsets = [BATCH_ENTRY.fields[name][1] for name in ("src", "dst", "width", "height", "depth", "order", "flags")]
    assert offsets == [0, 40, 80, 88, 96, 104, 108]


@pytest.mark.parametrize(
    ("structure", "size"), [(IpcHandle, 64), (Copy2D, 128), (WordOperation, 48), (CopyAttributes, 24)]
)
def test_structures_have_the_drivers_sizes(structure: type[ctypes.Structure], size: int) -> None:
    assert ctypes.sizeof(structure) == size


@pytest.mark.parametrize(("size", "unit", "want"), [(1, 2 << 20, 2 << 20), (2 << 20, 2 << 20, 2 << 20), (7, 4, 8)])
def test_sizes_are_rounded_up(size: int, unit: int, want: int) -> None:
    assert rounded(size, unit) == want


def test_a_handle_can_show_no_neighbour_because_sizes_are_rounded_to_what_the_driver_puts_together() -> None:
    assert all(rounded(size) % (2 << 20) == 0 for size in (1, 4096, (2 << 20) + 1, 123_456_789))


@pytest.mark.skipif(has_driver(), reason="this machine has an NVIDIA driver")
def test_without_a_driver_it_is_said_what_is_missing() -> None:
    for call in (driver, find_gpus):
        with pytest.raises(CudaMissing, match=r"no NVIDIA driver \(libcuda\.so\.1.*in a container, give it the GPU"):
            call()


def test_a_library_that_lacks_functions_is_an_old_driver() -> None:
    with pytest.raises(CudaMissing, match="has no cuInit: the driver is older than CUDA 12"):
        Driver(ctypes.CDLL(None))


def test_a_gpu_that_was_not_started_says_so() -> None:
    gpu = Gpu(GpuFacts("GPU-1", 0, "none", "0000:00:00.0", 1 << 30, (9, 0), (1 << 31) - 1))
    with pytest.raises(CudaMissing, match="GPU-1 is not started"):
        gpu.current()
    gpu.close()


def test_what_the_driver_says_is_a_typed_error() -> None:
    error = CudaOutOfMemory("cuMemAlloc_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
    assert isinstance(error, CudaError)
    assert isinstance(error, MemoryError)
    assert str(error) == "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"


def test_the_oracle_is_the_published_generator_and_its_tail_is_cut() -> None:
    whole = b"".join(word.to_bytes(8, "little") for word in SPLITMIX64_OF_0)
    for width in (1, 7, 8, 9, 23, 24):
        assert page_bytes(np.zeros(1, np.uint64), width).tobytes() == whole[:width]


def test_the_oracle_counts_words_once_and_the_tail_as_one() -> None:
    seeds = np.array([3, (1 << 64) - 1], np.uint64)
    content = page_bytes(seeds, 20)
    assert count_wrong(content, seeds).tolist() == [0, 0]
    content[0, [0, 1, 7]] ^= 1  # one word
    content[1, 8] ^= 1
    content[1, 19] ^= 1
    assert count_wrong(content, seeds).tolist() == [1, 2]
    assert count_wrong(content, seeds[::-1]).tolist() == [3, 3]


@pytest.mark.parametrize(
    ("pages", "seeds", "why"),
    [
        ([], [], "pages: shape"),
        ([[1]], [[1]], "pages: shape"),
        ([1.0], [1], "page numbers are integers"),
        ([1, 2], [1], "seeds: shape"),
        ([1, 1], [1, 2], "named twice"),
        ([1, -2], [1, 2], "-2 is negative"),
        ([1], [-1], "seeds: 0 to"),
    ],
)
def test_stamps_that_make_no_sense_are_refused_before_the_device_hears_of_them(
    pages: list[int], seeds: list[int], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        stamps(pages, seeds)
