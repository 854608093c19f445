"""``cachesvc calibrate``: measure the link of every GPU here, as the daemon does at its start."""

from __future__ import annotations

import json
from dataclasses import asdict

from cachesvc_client.core.errors import NotSupported

from cachesvc_ctl.core.command import Command, flag
from cachesvc_ctl.core.text import table
from gpu_ops.calibration import LinkFigures, calibrate
from gpu_ops.errors import CudaError, CudaMissing
from gpu_ops.gpu import Gpu, driver_version, find_gpus, started

WIDTHS = (4 << 10, 8 << 10, 16 << 10, 32 << 10, 128 << 10)
PLANES = 64


class Calibrate(Command):
    """Measure the GPUs of this machine, without a daemon."""

    name = "calibrate"
    about = "measure what bytes and copies between host and GPUs cost"
    flags = (flag("--json", action="store_true", help="print the figures as JSON"),)

    def run(self) -> int:
        """Raises NotSupported where there is no GPU that can be measured."""
        try:
            found = [(gpu, _measure(gpu)) for gpu in find_gpus()]
            release = ".".join(map(str, driver_version()))
        except (CudaMissing, CudaError) as error:
            raise NotSupported(str(error)) from error
        if self.arguments.json:
            rows = [{"uuid": gpu.uuid, "name": gpu.facts.name, **asdict(figures)} for gpu, figures in found]
            print(json.dumps({"cuda": release, "gpus": rows}, indent=1))
            return 0
        for gpu, figures in found:
            print(describe(gpu.facts.name, gpu.uuid, release, figures))
        return 0


def _measure(gpu: Gpu) -> LinkFigures:
    with started(gpu):
        return calibrate(gpu)


def efficiency(figures: LinkFigures, width: int, planes: int = PLANES) -> float:
    """Part of the link that loads of ``planes`` rows of ``width`` bytes a block reach, as estimated."""
    ideal_us = planes * width / figures.load_bytes_per_us
    return ideal_us / (ideal_us + figures.per_copy_us + planes * figures.per_row_ns / 1e3)


def describe(name: str, uuid: str, release: str, figures: LinkFigures) -> str:
    """The figures for people."""
    how = "one call for many copies" if figures.is_batched else "one call a copy (a driver older than CUDA 12.8)"
    rows = [
        (f"{width >> 10} KiB", f"{efficiency(figures, width):.2f}", "narrow" if is_narrow(figures, width) else "")
        for width in WIDTHS
    ]
    return (
        f"{name} {uuid}, driver for CUDA {release}, {how}\n"
        f"in {figures.load_bytes_per_us / 1e3:.1f} GB/s, out {figures.store_bytes_per_us / 1e3:.1f} GB/s, "
        f"both at once {figures.both_bytes_per_us / 1e3:.1f} GB/s\n"
        f"a copy {figures.per_copy_us:.2f} us, a row {figures.per_row_ns:.0f} ns, a step {figures.per_step_us:.2f} us, "
        f"largest pitch {figures.max_pitch_bytes} bytes\n"
        f"planes narrower than {figures.narrow_plane_bytes} bytes a block load at less than half of the link's speed\n"
        "\n" + table(("plane", f"of the link, {PLANES} planes a block", ""), rows) + "\n"
    )


def is_narrow(figures: LinkFigures, width: int) -> bool:
    """True where the copies' own cost is more than half of the time."""
    return width < figures.narrow_plane_bytes
