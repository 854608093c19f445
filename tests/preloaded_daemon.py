"""Imports of a daemon, for the process that forks daemons."""

from __future__ import annotations

import os
from importlib import import_module

os.environ["GRPC_VERBOSITY"] = "NONE"  # as the daemon has it before it imports gRPC
for name in (
    "cachesvc.daemon",
    "cachesvc.hardware",
    "cachesvc.machine",
    "cachesvc.nodes",
    "cachesvc.storages",
    "uvloop",
):
    import_module(name)
