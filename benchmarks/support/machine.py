"""Facts of the machine that a result was measured on, and the exit where it cannot be measured."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import NoReturn

NO_RESULT = 2
"""Exit code of a benchmark that could not run."""

DRIVER_FILE = Path("/proc/driver/nvidia/version")


def describe_machine() -> dict[str, str]:
    """CPU, cores, kernel, Python, date, and the load of the last minute."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cores": str(os.cpu_count()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def describe_gpu() -> dict[str, str]:
    """The first GPU and its driver; empty where there is none. Makes no context."""
    from gpu_ops.driver import CudaMissing
    from gpu_ops.gpu import driver_version, find_gpus

    try:
        facts = find_gpus()[0].facts
        major, minor = driver_version()
    except CudaMissing:
        return {}
    return {
        "gpu": facts.name,
        "gpu_memory_gib": f"{facts.total_bytes / (1 << 30):.1f}",
        "driver": _driver_release(),
        "cuda": f"{major}.{minor}",
    }


def require_gpu(*modules: str) -> None:
    """End the process with one line and exit code 2 where there is no GPU, or a module is not installed."""
    from gpu_ops.driver import CudaMissing
    from gpu_ops.gpu import find_gpus

    try:
        find_gpus()
    except CudaMissing as missing:
        fail(str(missing))
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        fail(f"this benchmark needs {' and '.join(absent)}: not installed in {sys.prefix}")


def fail(message: str) -> NoReturn:
    """Say why there is no result, and end with exit code 2."""
    path = Path(sys.argv[0])
    print(f"{path.parent.name if path.stem == '__main__' else path.stem}: {message}", file=sys.stderr)
    sys.exit(NO_RESULT)


def _driver_release() -> str:
    try:
        found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", DRIVER_FILE.read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found[0] if found else "unknown"
