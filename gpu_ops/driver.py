"""The CUDA driver API by ctypes: the few functions that are needed here. No toolkit, no headers, no CuPy.

ctypes lets go of the GIL for every call, so a call that submits a thousand copies blocks no other thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

LIBRARY = "libcuda.so.1"
IPC_HANDLE_BYTES = 64


class IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES),)


class Location(ctypes.Structure):
    _fields_ = (("kind", c_int), ("index", c_int))


class AccessRights(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", c_int))


class AllocationKind(ctypes.Structure):
    """CUmemAllocationProp. ``kind`` 1: pinned on its device; ``handles`` 1: a POSIX file descriptor."""

    _fields_ = (
        ("kind", c_int),
        ("handles", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D. A memory type of 4 means a unified address, given as a device's."""

    _fields_ = (
        ("src_x", c_size_t),
        ("src_y", c_size_t),
        ("src_type", c_int),
        ("src_host", c_void_p),
        ("src_device", c_uint64),
        ("src_array", c_void_p),
        ("src_pitch", c_size_t),
        ("dst_x", c_size_t),
        ("dst_y", c_size_t),
        ("dst_type", c_int),
        ("dst_host", c_void_p),
        ("dst_device", c_uint64),
        ("dst_array", c_void_p),
        ("dst_pitch", c_size_t),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes. ``order`` 1: sources are read in the stream's order; ``flags`` 1: by copy engines, where the
    driver can."""

    _fields_ = (("order", c_int), ("source", Location), ("target", Location), ("flags", c_uint))


class WordOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams, as waitValue and writeValue have it."""

    _fields_ = (
        ("operation", c_int),
        ("address", c_uint64),
        ("value", c_uint64),
        ("flags", c_uint),
        ("alias", c_uint64),
        ("pad", c_uint64),
    )


_OUT = c_void_p
_NEEDED: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (_OUT,),
    "cuDeviceGetCount": (_OUT,),
    "cuDeviceGet": (_OUT, c_int),
    "cuDeviceGetName": (_OUT, c_int, c_int),
    "cuDeviceGetUuid_v2": (_OUT, c_int),
    "cuDeviceGetPCIBusId": (_OUT, c_int, c_int),
    "cuDeviceTotalMem_v2": (_OUT, c_int),
    "cuDeviceGetAttribute": (_OUT, c_int, c_int),
    "cuDeviceCanAccessPeer": (_OUT, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (_OUT, c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (_OUT,),
    "cuCtxSetLimit": (c_int, c_size_t),
    "cuCtxEnablePeerAccess": (c_void_p, c_uint),
    "cuMemGetInfo_v2": (_OUT, _OUT),
    "cuMemAlloc_v2": (_OUT, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemsetD8_v2": (c_uint64, ctypes.c_ubyte, c_size_t),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpy2DAsync_v2": (_OUT, c_void_p),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (_OUT, c_void_p, c_uint),
    "cuIpcGetMemHandle": (_OUT, c_uint64),
    "cuIpcOpenMemHandle_v2": (_OUT, IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemGetAllocationGranularity": (_OUT, _OUT, c_int),
    "cuMemCreate": (_OUT, c_size_t, _OUT, c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemExportToShareableHandle": (_OUT, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (_OUT, c_void_p, c_int),
    "cuMemAddressReserve": (_OUT, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, _OUT, c_size_t),
    "cuStreamCreateWithPriority": (_OUT, c_uint, c_int),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamWriteValue32_v2": (c_void_p, c_uint64, c_uint32, c_uint),
    "cuStreamWaitValue32_v2": (c_void_p, c_uint64, c_uint32, c_uint),
    "cuStreamBatchMemOp_v2": (c_void_p, c_uint, _OUT, c_uint),
    "cuEventCreate": (_OUT, c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
}
_NEWER: dict[str, tuple[Any, ...]] = {
    "cuMemcpy3DBatchAsync": (c_size_t, c_void_p, _OUT, c_uint64, c_void_p),
    "cuMemcpyBatchAsync": (c_void_p, c_void_p, c_void_p, c_size_t, _OUT, _OUT, c_size_t, _OUT, c_void_p),
}
"""Absent from older drivers (CUDA 12.8 brought them); ``has`` tells."""


class Driver:
    """The loaded library. Made by ``driver()``, once."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._functions: dict[str, Any] = {}
        for name, arguments in (_NEEDED | _NEWER).items():
            function = getattr(library, name, None)
            if function is None and name in _NEEDED:
                raise CudaMissing(f"{LIBRARY} has no {name}: the driver is older than CUDA 12; update it")
            if function is not None:
                function.argtypes = arguments
                function.restype = c_int
                self._functions[name] = function
        for name in ("cuGetErrorName", "cuGetErrorString"):
            getattr(library, name).argtypes = (c_int, _OUT)

    def has(self, name: str) -> bool:
        """True where the driver knows this function."""
        return name in self._functions

    def call(self, name: str, *arguments: Any) -> None:
        """Check a result. Raises CudaError, or CudaOutOfMemory."""
        code = self._functions[name](*arguments)
        if code:
            kind = CudaOutOfMemory if code == OUT_OF_MEMORY else CudaError
            raise kind(name, code, self._text("cuGetErrorName", code), self._text("cuGetErrorString", code))

    def number(self, name: str, kind: Any, *arguments: Any) -> int:
        """Call a function whose first argument receives a number; returns it."""
        received = kind()
        self.call(name, ctypes.byref(received), *arguments)
        return int(received.value or 0)

    def _text(self, name: str, code: int) -> str:
        text = c_char_p()
        getattr(self._library, name)(code, ctypes.byref(text))
        return (text.value or b"unknown").decode()


@cache
def driver() -> Driver:
    """The driver, initialised. Raises CudaMissing that says what is missing."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise CudaMissing(f"this machine has no NVIDIA driver ({error}); in a container, give it the GPU") from error
    loaded = Driver(library)
    try:
        loaded.call("cuInit", 0)
    except CudaError as error:
        raise CudaMissing(f"the NVIDIA driver cannot be used: {error}") from error
    return loaded


@contextmanager
def current(context: int) -> Iterator[Driver]:
    """Make a context current on this thread for a while, whatever the engine has made current."""
    cuda = driver()
    cuda.call("cuCtxPushCurrent_v2", context)
    try:
        yield cuda
    finally:
        cuda.call("cuCtxPopCurrent_v2", ctypes.byref(c_void_p()))


# Errors of a GPU.
#
# CudaMissing              no driver, or one that is too old
# CudaError                a call of the driver failed: which, and its code
#     CudaOutOfMemory      the memory left does not suffice (a MemoryError too)

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
