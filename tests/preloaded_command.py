"""Imports of the command line and of the tests' engines, for the process that forks both."""

from __future__ import annotations

import os
from importlib import import_module

os.environ["GRPC_VERBOSITY"] = "NONE"  # as the command has it before it imports gRPC
for name in ("cachesvc_ctl.main", "tests.e2e.engine"):
    import_module(name)
