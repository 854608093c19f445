"""``cachesvc``, as its console script and ``python -m cachesvc_ctl`` start it."""

from __future__ import annotations

import os


def main() -> None:
    # Before gRPC is imported: what its core writes to standard error is for its developers; we word what went wrong.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from cachesvc_ctl.main import main as run

    run()


if __name__ == "__main__":
    main()
