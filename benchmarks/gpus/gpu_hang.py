"""Cost of a mover that hangs on one of several GPUs to the other GPUs: under load, and while a daemon starts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from cachesvc_ctl.core.daemon_process import DaemonProcess

from benchmarks.attach.interference import Neighbour, NeighbourLost
from benchmarks.gpus.gpu_calls import DEVICE_SPARE, HOST_SPARE, Swap, run_swapper
from benchmarks.support.movers import movers_of

WATCHED_SECONDS = 2.0
SERVED_SECONDS = 90.0


def measure_hang(backend: str, devices: Sequence[str], swap: Swap, found: dict[str, Any]) -> None:
    """Stop the last device's mover by SIGSTOP while an engine on each device swaps, then stop it again before the
    daemon is killed and started anew. Raises DaemonFailed, NeighbourLost for what another device's engine met."""
    pool_bytes = swap.pages * swap.layout.page_bytes(0)
    flags = ["--backend", backend, "--device-pool", str(pool_bytes + DEVICE_SPARE)]
    flags += ["--host-pool", str(len(devices) * (pool_bytes + HOST_SPARE)), "--shm-devices", str(len(devices))]
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess(flags, whole=True))
        found["ready_s"] = daemon.seconds_to_ready
        engines = [_swapper(daemon, device, swap, stack) for device in devices]
        found["before"] = _rates(engines, WATCHED_SECONDS, lambda: None)
        pids = movers_of(daemon.process.pid)
        stack.callback(_end, pids)
        began = time.perf_counter()
        *found["during"], _ = _rates(engines, WATCHED_SECONDS, lambda: os.kill(pids[devices[-1]], signal.SIGSTOP))
        found["served_again_s"] = _served_again(daemon, devices[-1], swap, stack, began)
        engines.pop()
        found["after"] = _rates(engines, WATCHED_SECONDS, lambda: None)
        print(f"daemon ready after {found['ready_s']:.2f} s; the mover of device {len(devices) - 1} hangs under load:")
        for phase in ("before", "during", "after"):
            print(f"  {phase:>6}: " + " ".join(f"{rate:.1f}" for rate in found[phase]) + " GB/s", flush=True)
        print(f"  a new engine there swapped {found['served_again_s']:.2f} s after the mover was stopped", flush=True)
        pids |= movers_of(daemon.process.pid)
        os.kill(pids[devices[-1]], signal.SIGSTOP)
        daemon.kill()
        began = time.perf_counter()
        daemon.start()
        found["start_beside_hung_s"] = daemon.seconds_to_ready
        pids |= movers_of(daemon.process.pid)
        _swapper(daemon, devices[0], swap, stack)
        found["first_swap_beside_hung_s"] = time.perf_counter() - began
        print(
            f"a daemon that starts beside a hung mover: ready after {found['start_beside_hung_s']:.2f} s, another "
            f"device's engine swapped after {found['first_swap_beside_hung_s']:.2f} s",
            flush=True,
        )


def _swapper(daemon: DaemonProcess, device: str, swap: Swap, stack: ExitStack) -> Neighbour:
    engine = Neighbour(f"engine on {device}", run_swapper, daemon.socket, device, swap)
    stack.callback(_close, engine)
    return engine


def _rates(engines: Sequence[Neighbour], seconds: float, then: Callable[[], None]) -> list[float]:
    """GB/s of each engine over a time that begins with ``then``; NaN for the last one where it met an error."""
    for engine in engines:
        engine.send("swap")
    for engine in engines:
        engine.expect("running")
    then()
    time.sleep(seconds)  # the load runs meanwhile
    rates = list[float]()
    for engine in engines[:-1]:
        engine.send("enough")
        rates.append(engine.answer())
    try:
        engines[-1].send("enough")
        rates.append(engines[-1].answer())
    except NeighbourLost:
        rates.append(float("nan"))
    return rates


def _served_again(daemon: DaemonProcess, device: str, swap: Swap, stack: ExitStack, began: float) -> float:
    """Seconds from ``began`` until a new engine on a device has swapped. Raises NeighbourLost."""
    while True:
        try:
            _swapper(daemon, device, swap, stack)
            return time.perf_counter() - began
        except NeighbourLost:
            if time.perf_counter() - began > SERVED_SECONDS:
                raise


def _close(engine: Neighbour) -> None:
    try:
        engine.close()
    except NeighbourLost:
        return  # the death of its mover or daemon ended it


def _end(pids: dict[str, int]) -> None:
    """Stopped movers do not end by themselves."""
    for pid in pids.values():
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue
