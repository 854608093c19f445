"""Launches kernels on a stream that the caller names. Needs CuPy; the first use of a kernel compiles it."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

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


# Compiles kernels by NVRTC, which needs no GPU: so that a kernel that cannot be built fails where there is none.
#
# NVRTC comes from the wheels of the extra ``gpucheck``, or from an installed toolkit. What runs kernels (CuPy) compiles
# them by itself; this is for checking.

KERNELS = Path(__file__).parent
SUFFIX = ".cu"
STANDARD = "--std=c++17"
LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
TOOLKIT_HEADERS = Path("/usr/local/cuda/include")

_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "nvrtcCreateProgram": (POINTER(c_void_p), c_char_p, c_char_p, c_int, c_void_p, c_void_p),
    "nvrtcCompileProgram": (c_void_p, c_int, POINTER(c_char_p)),
    "nvrtcDestroyProgram": (POINTER(c_void_p),),
    "nvrtcGetProgramLogSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetProgramLog": (c_void_p, c_char_p),
    "nvrtcGetCUBINSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetCUBIN": (c_void_p, c_char_p),
}


class CompilerMissing(RuntimeError):
    """This machine has no NVRTC."""


class KernelRejected(RuntimeError):
    """NVRTC does not take a source: ``log`` is what it says."""

    def __init__(self, source: str, architecture: str, log: str) -> None:
        super().__init__(f"{source} does not compile for {architecture}:\n{log}")
        self.source = source
        self.architecture = architecture
        self.log = log


def kernel_files(folder: Path = KERNELS) -> tuple[Path, ...]:
    """Every kernel source below a folder, sorted."""
    return tuple(sorted(folder.rglob(f"*{SUFFIX}")))


def compile_file(path: Path, architecture: str) -> bytes:
    """The cubin of one source for an architecture such as ``sm_90``. Raises KernelRejected, CompilerMissing."""
    return compile_source(path.read_text(encoding="utf-8"), path.name, architecture, (path.parent,))


def compile_source(source: str, name: str, architecture: str, headers: tuple[Path, ...] = ()) -> bytes:
    """The cubin of a source text; ``headers``: folders to look for them, before CUDA's own. Raises as
    ``compile_file``."""
    nvrtc = _nvrtc()
    include = [f"--include-path={folder}" for folder in (*headers, *_header_folders())]
    options = [option.encode() for option in (f"--gpu-architecture={architecture}", STANDARD, *include)]
    program = c_void_p()
    _check(nvrtc.nvrtcCreateProgram(byref(program), source.encode(), name.encode(), 0, None, None), name)
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(options), (c_char_p * len(options))(*options))
        if failed:
            log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program, name)
            raise KernelRejected(name, architecture, log.rstrip(b"\0").decode(errors="replace"))
        return _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program, name)
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


def _text(size_of: Any, fetch: Any, program: c_void_p, name: str) -> bytes:
    size = c_size_t()
    _check(size_of(program, byref(size)), name)
    text = ctypes.create_string_buffer(size.value)
    _check(fetch(program, text), name)
    return text.raw


def _check(code: int, name: str) -> None:
    if code:
        raise KernelRejected(name, "any architecture", f"NVRTC itself failed, with code {code}")


@cache
def _nvrtc() -> ctypes.CDLL:
    for candidate in (*_from_wheels("lib", LIBRARIES), *LIBRARIES):
        try:
            library = ctypes.CDLL(str(candidate))
        except OSError:
            continue
        for name, arguments in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = c_int
        return library
    raise CompilerMissing("this machine has no NVRTC: install the extra gpucheck, or a CUDA toolkit")


def _header_folders() -> Iterator[Path]:
    for header in (*_from_wheels("include", ("cuda_fp16.h",)), TOOLKIT_HEADERS / "cuda_fp16.h"):
        if header.is_file():
            yield header.parent
            return


def _from_wheels(kind: str, names: tuple[str, ...]) -> Iterator[Path]:
    """Files of NVIDIA's wheels, which lie below one package without a module: ``nvidia/cu13/lib`` and the like."""
    package = importlib.util.find_spec("nvidia")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        for name in names:
            yield from sorted(Path(folder).glob(f"*/{kind}/{name}"))
