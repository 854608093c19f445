"""``cachesvc check``: what a daemon lacks on this machine. The daemon's own code looks, in a process of its own."""

from __future__ import annotations

import os
import subprocess

from cachesvc.model.text.interpreter import module_command
from cachesvc_ctl.core.command import Command, flag

SETTINGS = ("config", "socket", "backend", "device_pool", "host_pool")


class Check(Command):
    """Look at driver, memory, limits, socket, ports and versions, for a daemon of these settings."""

    name = "check"
    about = "what this machine lacks for a daemon, with remedies"
    epilog = "Exit codes: 0 nothing is missing, 1 something is, 2 the settings are invalid. Warnings change no code."
    flags = (
        flag("--config", metavar="FILE", help="the daemon's configuration (cachesvcd --config)"),
        flag("--socket", metavar="PATH", help="its socket (else CACHESVC_SOCKET, else /run/cachesvc/cachesvc.sock)"),
        flag("--backend", metavar="NAME", help="its memory: auto (default), cuda or shm"),
        flag("--device-pool", metavar="SIZE", help="its device pool (default 1GiB)"),
        flag("--host-pool", metavar="SIZE", help="its host pool (default 1GiB)"),
        flag("--json", action="store_true", help="print the lines as JSON"),
    )

    def run(self) -> int:
        """Return the daemon's own verdict."""
        said = self.arguments
        if said.socket is None and said.config is None:  # as for every other command
            said.socket = os.environ.get("CACHESVC_SOCKET")
        given = [(name, getattr(said, name)) for name in SETTINGS]
        flags = [word for name, value in given if value for word in ("--" + name.replace("_", "-"), value)]
        form = "json" if said.json else "text"
        return subprocess.run(module_command("cachesvc", *flags, "--check-machine", form), check=False).returncode  # noqa: S603
