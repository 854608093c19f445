"""Runs a daemon whose loop watch counts processor time of the loop's thread, and logs each long time.

``python -m benchmarks.loop.round_log FILE PYTHON -P -m cachesvc FLAGS``: as ``under`` of a DaemonProcess. A line of the
file has the time (``time.monotonic``), the flow or ``round``, and the milliseconds.
"""

from __future__ import annotations

import os
import runpy
import sys
import time

LEAST_SECONDS = 0.0003


def main() -> None:
    """Run the daemon in this process."""
    _, path, _, _, _, module, *flags = sys.argv
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    time.perf_counter = time.thread_time  # a busy machine then does not show
    from cachesvc.service.loop.line import Longest

    def note(self: Longest, what: str, seconds: float, now: float) -> None:  # noqa: ARG001 - of its own face
        if seconds >= LEAST_SECONDS:
            os.write(log, f"{time.monotonic():.6f} {what} {seconds * 1e3:.3f}\n".encode())

    Longest.note = note  # type: ignore[method-assign]
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
