"""Launches kernels on a stream that the caller names. Needs CuPy; the first use of a kernel compiles it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from gpu_ops.kernels.compile import KERNELS, STANDARD
from gpu_ops.kernels.operands import Operand

INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)
MAX_GRID = 65535
"""Limit of a grid's y and z."""


def launch(
    source: str,
    kernel: str,
    grid: tuple[int, ...],
    threads: int,
    arguments: Sequence[object],
    stream: int,
    device: int,
) -> None:
    """Queue a kernel of ``kernels/<source>.cu`` on ``stream`` (a CUDA handle).

    Operands are passed as addresses, None as a null pointer, integers as 64 bits, floats as 32: kernels take nothing
    else. The operands' memory must stay until it is done.
    """
    import cupy

    with cupy.cuda.Device(device), external_stream(stream):
        module(source).get_function(kernel)(grid, (threads,), tuple(map(_scalar, arguments)))


def external_stream(handle: int) -> Any:
    """CuPy's object for a stream that another library made."""
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14; the older way ends with it
        return cupy.cuda.Stream.from_external(_Handle(handle))
    return cupy.cuda.ExternalStream(handle)


@cache
def module(source: str) -> Any:
    """CuPy's module of a source. Headers are written into it: CuPy's cache of binaries does not look at them."""
    import cupy

    return cupy.RawModule(code=whole_source(source), options=(STANDARD,))


def whole_source(source: str) -> str:
    """The text of a source with its own headers in place."""
    text = (KERNELS / f"{source}.cu").read_text(encoding="utf-8")
    return INCLUDE.sub(lambda found: (KERNELS / found[1]).read_text(encoding="utf-8"), text)


def blocks_for(work: int, each: int) -> int:
    """Blocks of threads that cover ``work``."""
    return -(-work // each)


def _scalar(argument: object) -> Any:
    match argument:
        case Operand():
            return np.uint64(argument.address)
        case None:
            return np.uint64(0)
        case float():
            return np.float32(argument)
        case int():
            return np.int64(argument)
    raise TypeError(f"a kernel takes no {type(argument).__name__}")


class _Handle:
    """A stream by its handle, as the CUDA stream protocol wants it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle
