"""Lists the GPUs by a short-lived process: the daemon itself never calls the driver."""

from __future__ import annotations

import json
import subprocess
from typing import Any, TypedDict

from cachesvc.model.errors import Unavailable
from cachesvc.model.text.interpreter import module_command

LIST_SECONDS = 60.0
"""Time limit of the driver, seconds."""


class ListedGpu(TypedDict):
    """A GPU as the process names it. ``has_vmm``: see ``GpuFacts``; ``reaches``: GPUs that it can read from."""

    uuid: str
    name: str
    pci: str
    has_vmm: bool
    reaches: list[str]


class Listing:
    """The process runs from the beginning, so that its second or so passes while the daemon's modules are imported. One
    that is never asked ends by itself."""

    def __init__(self) -> None:
        """Start the listing. Raises Unavailable."""
        command = module_command("cachesvc.mover", "--list")
        try:
            self._process = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            raise _unlisted(error) from error

    def gpus(self) -> dict[str, Any]:
        """Its result, once: ``gpus``, each with the devices that it reaches; or why there are none (``absent``,
        ``broken``).

        Raises Unavailable.
        """
        said = b""
        try:
            told, said = self._process.communicate(timeout=LIST_SECONDS)
            if self._process.returncode:
                raise OSError(f"exit code {self._process.returncode}")
            found: dict[str, Any] = json.loads(told)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._process.kill()
            raise _unlisted(error, said) from error
        return found


def _unlisted(error: Exception, said: bytes = b"") -> Unavailable:
    why = said.decode(errors="replace").strip().rpartition("\n")[2]
    return Unavailable(f"the GPUs cannot be listed: {error}{why and f' ({why})'}; see nvidia-smi, or use --backend shm")
