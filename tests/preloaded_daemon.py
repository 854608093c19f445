"""Imports of a daemon, for the process that forks daemons."""

from __future__ import annotations

import os

os.environ["GRPC_VERBOSITY"] = "NONE"  # as the daemon's own first lines have it
