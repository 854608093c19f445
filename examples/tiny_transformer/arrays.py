"""Where the arithmetic runs: NumPy, or torch on a device. The model is written once, for what both have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gpu_ops.kernels.operands import Half
from gpu_ops.kernels.reference_numbers import MAX_E4M3, decode_e4m3, encode_e4m3, narrow, widen

Array = Any  # a NumPy array, or a torch tensor of the same shape and dtype

GPU_LANES = 16
GPU_STEP_BLOCKS = 8

FP8_VALUES = decode_e4m3(np.arange(256, dtype=np.uint8))


class Pool(Protocol):
    """The required part of an attached pool."""

    def group_planes(self, group: str) -> Any:
        """NumPy arrays of a group's planes by (layer, name)."""
        ...

    def to_torch(self, layer: int, name: str, group: str) -> Any:
        """One plane as a tensor."""
        ...


@dataclass(frozen=True)
class Arrays:
    """NumPy. ``xp`` holds the functions that both modules name alike.

    Conversions are the kernels': to nearest even, fp8 (e4m3fn) saturating. Both modules give the same bytes.
    """

    xp: Any = np
    lanes: int = 1  # how many chunks are computed side by side, empty ones among them
    step_blocks: int = 1  # what a chunk gathers is filled up to a multiple of it, so that chunks find their like

    @property
    def label(self) -> str:
        """Name of the arithmetic that the bits depend on besides the weights; part of a model's digest."""
        return "numpy"

    def put(self, array: npt.NDArray[Any]) -> Array:
        """A NumPy array as an array of this module, on its device."""
        return array

    def get(self, array: Array) -> npt.NDArray[Any]:
        """The other way; waits until the values are there."""
        assert isinstance(array, np.ndarray)
        return array

    def zeros(self, shape: tuple[int, ...], like: Array) -> Array:
        """Zeros of another array's dtype and place."""
        return np.zeros(shape, dtype=like.dtype)

    def blank(self, pages: Array, where: Array) -> None:
        """Write zeros into the rows of [n, heads, T, width] that ``where`` [n, T] marks."""
        pages.swapaxes(1, 2)[where] = 0

    def stable_order(self, values: Array) -> Array:
        """Indices that sort each row of the last axis upwards; equal ones stay in their order."""
        return np.argsort(values, axis=-1, kind="stable")

    def to_fp8(self, values: Array) -> Array:
        """Codes of finite float32 values, a byte each."""
        return encode_e4m3(values)

    def from_fp8(self, codes: Array) -> Array:
        """Values of codes, in float32."""
        return FP8_VALUES[codes]

    def to_bf16(self, values: Array) -> Array:
        """The bytes of finite float32 values [..., n] in bf16: [..., 2 n]."""
        return self.to_bytes(narrow(np.ascontiguousarray(values), Half.BF16))

    def from_bf16(self, raw: Array) -> Array:
        """Bytes [..., 2 n] as float32 values [..., n]."""
        return widen(np.ascontiguousarray(raw).view(np.uint16), Half.BF16)

    def to_bytes(self, values: Array) -> Array:
        """The bytes of values [..., n]; a value's lie side by side."""
        return np.ascontiguousarray(values).view(np.uint8)

    def from_bytes(self, raw: Array) -> Array:
        """Bytes [..., 4 n] as float32 values [..., n]."""
        return np.ascontiguousarray(raw).view(np.float32)

    def plane_of(self, pool: Pool, layer: int, name: str, group: str) -> Array:
        """A plane of an attached pool, over the same bytes."""
        return pool.group_planes(group)[layer, name]


@dataclass(frozen=True)
class TorchArrays(Arrays):
    """torch. ``device``: "cpu", "cuda", ..."""

    device: str = "cpu"

    @property
    def label(self) -> str:
        """Two devices round differently."""
        return f"torch {self.xp.__version__} {self.device} {self.lanes} {self.step_blocks}"

    def put(self, array: npt.NDArray[Any]) -> Array:
        """A tensor on the device."""
        return self.xp.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def get(self, array: Array) -> npt.NDArray[Any]:
        """A tensor's values in host memory."""
        values: npt.NDArray[Any] = array.cpu().numpy()
        return values

    def zeros(self, shape: tuple[int, ...], like: Array) -> Array:
        """Zeros of a tensor's dtype on its device."""
        return like.new_zeros(shape)

    def blank(self, pages: Array, where: Array) -> None:
        """Write zeros into the rows of [n, heads, T, width] that ``where`` [n, T] marks. Waits for nothing."""
        pages.masked_fill_(where[:, None, :, None], 0)

    def stable_order(self, values: Array) -> Array:
        """Indices that sort each row of the last axis upwards; equal ones stay in their order."""
        return self.xp.argsort(values, dim=-1, stable=True)

    def to_fp8(self, values: Array) -> Array:
        """Codes of finite float32 values, a byte each."""
        largest = float(MAX_E4M3)  # torch itself makes NaN of what is larger
        return values.clamp(-largest, largest).to(self.xp.float8_e4m3fn).view(self.xp.uint8)

    def from_fp8(self, codes: Array) -> Array:
        """Values of codes, in float32."""
        return codes.contiguous().view(self.xp.float8_e4m3fn).to(self.xp.float32)

    def to_bf16(self, values: Array) -> Array:
        """The bytes of finite float32 values [..., n] in bf16: [..., 2 n]."""
        return self.to_bytes(values.to(self.xp.bfloat16))

    def from_bf16(self, raw: Array) -> Array:
        """Bytes [..., 2 n] as float32 values [..., n]."""
        return raw.contiguous().view(self.xp.bfloat16).to(self.xp.float32)

    def to_bytes(self, values: Array) -> Array:
        """The bytes of values [..., n]; a value's lie side by side."""
        return values.contiguous().view(self.xp.uint8)

    def from_bytes(self, raw: Array) -> Array:
        """Bytes [..., 4 n] as float32 values [..., n]."""
        return raw.contiguous().view(self.xp.float32)

    def plane_of(self, pool: Pool, layer: int, name: str, group: str) -> Array:
        """A plane of an attached pool, over the same bytes."""
        return pool.to_torch(layer, name, group)


NUMPY = Arrays()


def torch_arrays(device: str) -> TorchArrays:
    """torch on a device, in full float32; on a GPU chunks run side by side, since there a launch is what costs.

    Raises ImportError where torch is not installed.
    """
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    if device == "cpu":
        torch.set_num_threads(1)  # as digest.ONE_BLAS_THREAD
        return TorchArrays(torch, device=device)
    return TorchArrays(torch, GPU_LANES, GPU_STEP_BLOCKS, device)
