"""Commands in processes forked from one that has their imports, which are nearly all of a command's half a second.

``test_docs_commands.py`` and some of ``test_first_hour.py`` start theirs as users do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tests.forked_daemon import daemon_forker
from tests.forked_process import ROOT, ForkedProcess, Forker

BOUND_SECONDS = 120.0


def run_forked(
    module: str, *arguments: str, folder: Path = ROOT, environment: Mapping[str, str] | None = None, typed: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module``, ``cachesvc`` or ``cachesvc_ctl``, as ``subprocess.run`` would; its output is captured.

    ``environment``: ours, unless given. ``typed``: its standard input.
    """
    forker = daemon_forker() if module == "cachesvc" else command_forker()
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as failed:
        asked.write(typed.encode())
        asked.seek(0)
        streams = asked.fileno(), said.fileno(), failed.fileno()
        process = ForkedProcess(
            forker.socket, module, arguments, os.environ if environment is None else environment, streams, str(folder)
        )
        code = process.wait(BOUND_SECONDS)
        said.seek(0)
        failed.seek(0)
        return subprocess.CompletedProcess([module, *arguments], code, said.read().decode(), failed.read().decode())


@cache
def command_forker() -> Forker:
    """The process that forks commands and engines."""
    return Forker(sys.executable, "tests.preloaded_command", dict(os.environ))
