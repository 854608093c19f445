"""Processes with vLLM's scheduler and no model, which ask for what befalls their daemon: lines that begin with @."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from tests.vllm.rig import forker

Fault = Callable[..., object]
"""``fault(process, *words)``: the process waits for its end. ``words`` are those behind its name."""


def run_module(module: str, *arguments: str, faults: Mapping[str, Fault]) -> dict[str, int]:
    """Run a module under the Python that has vLLM, and return the counts of its last line, in JSON."""
    last = ""
    with forker().start(module, *arguments) as process:
        for line in process.stdout:
            if line.startswith("@"):
                name, *words = line.partition("(")[0].split()  # vLLM may log behind it, by the process's name
                faults[name](process, *words)
                process.stdin.write("done\n")
                process.stdin.flush()
            else:
                last = line
    assert process.returncode == 0
    found: dict[str, int] = json.loads(last)
    return found


def daemon_faults(kill: Callable[[], object], start: Callable[[], object]) -> dict[str, Fault]:
    """Return the faults of a daemon that dies and comes again."""
    return {"@kill": lambda _: kill(), "@start": lambda _: start()}
