"""``cachesvc-mover``: memory and copies of one device, for one daemon at a time.

A daemon with ``--movers process`` starts its movers itself. One that is started by hand listens on ``--socket`` and is
named to the daemon by ``--mover``; it serves one daemon after another, and keeps nothing from one to the next.
"""

from __future__ import annotations

import argparse
import errno
import gc
import json
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from cachesvc import __version__
from cachesvc.memory.host_pool import Neighbours
from cachesvc.memory.shm import ShmBackend
from cachesvc.model.errors import CacheError, InvalidRequest, Unavailable
from cachesvc.model.text import Parser
from cachesvc.mover.life import ListedGpu
from cachesvc.mover.records import Settings
from cachesvc.mover.server import Equipment, MoverServer
from cachesvc.swap.planner import H100_COSTS, LinkCosts, costs_of
from cachesvc.telemetry.events import start_logging

if TYPE_CHECKING:
    from gpu_ops.gpu import Gpu

SWITCH_SECONDS = 0.0002
"""Interval after which one thread yields the interpreter to another, seconds: a new job waits for no earlier one's
plan."""
BACKLOG = 1

log = logging.getLogger("cachesvc.mover")


def main() -> None:
    """Entry point of the console script. Exit codes: 0 ended in order, 2 a command line or a socket that cannot be."""
    flags = _parser().parse_args(sys.argv[1:])
    if flags.list:
        print(json.dumps(_gpus()))
        return
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()  # no pass of the collector looks at what is there for good
    start_logging("info")
    if flags.connected is not None:
        for number in (signal.SIGINT, signal.SIGTERM):  # meant for the daemon, which then hangs up
            signal.signal(number, signal.SIG_IGN)
        MoverServer(socket.socket(fileno=flags.connected), __version__, partial(_equip_only, flags.gpu)).serve()
        return
    if not flags.socket:
        _parser().error("--socket PATH says where the daemon finds this mover")
    try:
        _listen(flags.socket, flags.gpu)
    except (OSError, CacheError) as refused:
        log.error("start_refused reason=%s", refused)
        sys.exit(2)


def equip(settings: Settings, neighbours: Neighbours) -> Equipment:
    """Equipment of a mover with these settings. Raises Unavailable, InvalidRequest."""
    if settings.kind == "shm":
        return _shm(settings, neighbours)
    if settings.kind == "cuda":
        return _cuda(settings, neighbours)
    raise InvalidRequest(f"there are no movers of kind {settings.kind!r}")


def _equip_only(device: str, settings: Settings, neighbours: Neighbours) -> Equipment:
    """Equip for one device alone, where it has a name. Raises as ``equip``."""
    if device and settings.device != device:
        raise InvalidRequest(f"this mover is for {device}, not for {settings.device}")
    return equip(settings, neighbours)


def _shm(settings: Settings, neighbours: Neighbours) -> Equipment:
    backend = ShmBackend(
        1,
        settings.device_bytes,
        timeline_words=settings.timeline_words,
        rules=settings.rules,
        fault_copies=settings.fault_copies,
        names=(settings.device,),
        neighbours={settings.device: neighbours},
    )
    return Equipment(backend, dict)


def _cuda(settings: Settings, neighbours: Neighbours) -> Equipment:
    from cachesvc.memory.cuda import CudaBackend
    from gpu_ops.gpu import gpu_by_uuid

    try:
        gpu = gpu_by_uuid(settings.device)
    except RuntimeError as missing:
        raise Unavailable(f"{missing}; see nvidia-smi, or use --backend shm") from missing
    backend = CudaBackend(
        (gpu,),
        settings.device_bytes,
        vmm=settings.vmm,
        timeline_words=settings.timeline_words,
        rules=settings.rules,
        neighbours={gpu.uuid: neighbours},
    )

    def facts() -> dict[str, Any]:
        return {
            "name": gpu.facts.name,
            "pci": gpu.facts.pci,
            "context_bytes": gpu.context_bytes,
            "free_bytes": gpu.free_bytes(),
        }

    def measure() -> tuple[dict[str, Any], LinkCosts]:
        from dataclasses import asdict

        from gpu_ops.calibration import calibrate

        try:
            figures = asdict(calibrate(gpu))
        except RuntimeError as error:
            raise Unavailable(
                f"GPU {gpu.uuid} cannot be measured: {error}; see nvidia-smi and ulimit -l, or use --calibration never"
            ) from error
        return figures, costs_of(figures)

    def stores_at_once(begin: float, seconds: float) -> float:
        from gpu_ops.calibration import store_rate

        try:
            return store_rate(gpu, begin, seconds)
        except (RuntimeError, MemoryError) as error:
            raise Unavailable(f"GPU {gpu.uuid} cannot be measured beside others: {error}; see nvidia-smi") from error

    return Equipment(backend, facts, measure, H100_COSTS, stores_at_once)


def _gpus() -> dict[str, Any]:
    """The GPUs that this process sees and which of them reach which; or why there are none (``absent``, ``broken``)."""
    from gpu_ops.driver import CudaMissing
    from gpu_ops.gpu import find_gpus

    try:
        gpus = find_gpus()
    except CudaMissing as missing:
        return {"absent": str(missing)}
    except RuntimeError as broken:
        return {"broken": str(broken)}
    return {"gpus": listed(gpus)}


def listed(gpus: Sequence[Gpu]) -> list[ListedGpu]:
    """Return what the daemon reads of each GPU, a line each."""
    return [
        {
            "uuid": gpu.uuid,
            "name": gpu.facts.name,
            "pci": gpu.facts.pci,
            "has_vmm": gpu.facts.has_vmm,
            "reaches": [other.uuid for other in gpus if other is not gpu and gpu.can_reach(other)],  # reads from them
        }
        for gpu in gpus
    ]


def _listen(path: str, gpu: str) -> NoReturn:
    """Serve one daemon after another. Raises OSError."""
    _make_way(path)

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        Path(path).unlink(missing_ok=True)
        os._exit(0)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(path)
        Path(path).chmod(0o600)
        listening.listen(BACKLOG)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
        while True:
            connection, _ = listening.accept()
            log.info("mover_serves pid=%d", os.getpid())
            MoverServer(connection, __version__, partial(_equip_only, gpu)).serve()


def _make_way(path: str) -> None:
    """Remove the socket that a killed mover has left. Raises OSError for anything else."""
    try:
        is_socket = stat.S_ISSOCK(Path(path).lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise FileExistsError(f"{path} is there and no socket: choose another --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        if connection.connect_ex(path) != errno.ECONNREFUSED:
            raise FileExistsError(f"{path} is another mover's, or not a socket: choose another --socket")
    Path(path).unlink(missing_ok=True)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="cachesvc-mover", description="Owns the memory of one device, and moves its bytes for cachesvcd."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument(
        "--socket", metavar="PATH", default="", help="unix socket where a daemon finds it (--mover PATH)"
    )
    parser.add_argument(
        "--gpu", metavar="UUID", default="", help="serve this device alone (default: the one it is asked for)"
    )
    parser.add_argument("--connected", type=int, metavar="FD", help=argparse.SUPPRESS)  # how daemons start theirs
    parser.add_argument("--list", action="store_true", help="print the GPUs that are there as JSON, and end")
    return parser


if __name__ == "__main__":
    main()
