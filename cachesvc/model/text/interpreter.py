"""Command lines of child processes that run one of this project's modules."""

from __future__ import annotations

import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this interpreter.

    ``-P`` keeps the working directory off the module search path. With ``-m`` alone the child imports a file
    ``random.py`` there: code execution where the daemon runs as root in a user's folder.
    """
    return [sys.executable, "-P", "-m", module, *arguments]
