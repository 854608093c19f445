"""``cachesvc wait``: wait until the daemon takes work, for programs that start after it and for container engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import grpc
from cachesvc_client.core.errors import NotSupported, PermissionDenied, Unauthenticated, error_of
from cachesvc_client.wire.credentials import open_remote
from cachesvc_client.wire.settings import ChannelOptions

from cachesvc_ctl.core.command import DaemonCommand, flag, seconds
from cachesvc_ctl.core.target import no_answer

METHOD = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"
"""A HealthCheckResponse whose one field, the status, is SERVING. Its generated messages are the daemon's extra."""
LOOK_SECONDS = 0.2
CALL_SECONDS = 5.0
PERMANENT = (Unauthenticated, PermissionDenied, NotSupported)
"""Refusals that stay as they are until the operator changes a token, or names another daemon."""
OPTIONS = ChannelOptions(first_reconnect_ms=1000, longest_reconnect_ms=1000)
"""A daemon that comes is found within a second; an attempt to connect has as long."""


class Wait(DaemonCommand):
    """Asks for health, with whatever the caller proves itself by: any scope is enough."""

    name = "wait"
    about = "wait until the daemon takes new work, or fail in time"
    epilog = "A daemon that starts, drains or has lost its GPU is not ready. Exit code 1 when the time is over."
    flags = (
        flag("--ready", action="store_true", default=True, help="until health checks say SERVING"),
        flag("--timeout", type=seconds, default=300.0, metavar="SECONDS", help="at most so long (default 300)"),
    )

    def run(self) -> int:
        """Return 0 once the daemon is ready, 1 when the time is over. Raises grpc.RpcError for a permanent refusal."""
        target, timeout = self.target, self.arguments.timeout
        until = time.monotonic() + timeout
        pause = threading.Event()
        with open_remote(target.address, target.credentials, OPTIONS) as channel:
            check: Callable[..., bytes] = channel.unary_unary(
                METHOD, request_serializer=bytes, response_deserializer=bytes
            )
            while True:
                left = until - time.monotonic()
                why = self._look(check, min(CALL_SECONDS, max(LOOK_SECONDS, left)))
                if not why:
                    print("ready")
                    return 0
                if left <= LOOK_SECONDS:
                    print(f"not ready after {timeout:g} s: {why}")
                    return 1
                pause.wait(LOOK_SECONDS)

    def _look(self, check: Callable[..., bytes], limit: float) -> str:
        """Return why it is not ready; empty once it is. Raises grpc.RpcError for a refusal that no wait cures."""
        try:
            is_ready = check(b"", timeout=limit) == SERVING
        except grpc.RpcError as failure:
            if isinstance(error_of(failure), PERMANENT):
                raise
            return no_answer(failure, self.arguments)
        return "" if is_ready else f"{self.target.address} answers NOT_SERVING: it starts, drains or is broken"
