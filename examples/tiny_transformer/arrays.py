"""Where the arithmetic runs: NumPy, or torch on a device. The model is written once, for what both have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = Any  # a NumPy array, or a torch tensor of the same shape and dtype


class Pool(Protocol):
    """What is needed of an attached pool."""

    def group_planes(self, group: str) -> Any:
        """NumPy arrays of a group's planes by (layer, name)."""
        ...

    def to_torch(self, layer: int, name: str, group: str) -> Any:
        """One plane as a tensor."""
        ...


@dataclass(frozen=True)
class Arrays:
    """NumPy. ``xp`` holds the functions that both modules name alike."""

    xp: Any = np

    @property
    def label(self) -> str:
        """What the bits depend on besides the weights; part of a model's digest."""
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

    def plane_of(self, pool: Pool, layer: int, name: str, group: str) -> Array:
        """A plane of an attached pool, over the same bytes."""
        return pool.group_planes(group)[layer, name]


@dataclass(frozen=True)
class TorchArrays(Arrays):
    """torch; float32 planes only, so neither of the packed families. ``device``: "cpu", "cuda", ..."""

    device: str = "cpu"

    @property
    def label(self) -> str:
        """Two devices round differently."""
        return f"torch {self.xp.__version__} {self.device}"

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

    def plane_of(self, pool: Pool, layer: int, name: str, group: str) -> Array:
        """A plane of an attached pool, over the same bytes."""
        return pool.to_torch(layer, name, group)


NUMPY = Arrays()


def torch_arrays(device: str) -> TorchArrays:
    """torch on a device, in full float32. Raises ImportError where torch is not installed."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    return TorchArrays(torch, device)
