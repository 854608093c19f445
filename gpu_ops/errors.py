"""Errors of a GPU.

CudaMissing              no driver, or one that is too old
CudaError                a call of the driver failed: which, and its code
    CudaOutOfMemory      the memory left does not suffice (a MemoryError too)
"""

from __future__ import annotations

OUT_OF_MEMORY = 2


class CudaMissing(RuntimeError):
    """This machine has no NVIDIA driver that can be used, or a GPU that was named is not there."""


class CudaError(RuntimeError):
    """``call`` returned ``code``, which the driver calls ``name``."""

    def __init__(self, call: str, code: int, name: str, description: str) -> None:
        super().__init__(f"{call}: {name} ({code}): {description}")
        self.call = call
        self.code = code
        self.name = name


class CudaOutOfMemory(CudaError, MemoryError):
    """The device (or the machine, for pinned memory) has not that much memory left."""
