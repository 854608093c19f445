"""Rule for sending a broken call again, shared by the blocking and the awaited client."""

from __future__ import annotations

import grpc

from cachesvc_client.core.errors import CacheClientError, DaemonUnavailable, error_of, is_refusal
from cachesvc_client.wire.settings import Retries


class Attempts:
    """The attempts of one call, under one request_id and one deadline (``time.monotonic()``)."""

    def __init__(self, retries: Retries, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._left = retries.attempts - 1
        self._pause_s = retries.pause_s

    def left_s(self, now_s: float) -> float:
        """Time until the deadline, never quite none: gRPC takes 0 for a call that has failed already."""
        return max(self._deadline_s - now_s, 0.001)

    def pause_after(self, failure: grpc.RpcError, now_s: float) -> float:
        """Seconds to wait before the next attempt. Raises the call's typed error where no attempt is left."""
        error = error_of(failure)
        if not is_broken_way(failure, error) or self._left == 0 or now_s + self._pause_s >= self._deadline_s:
            raise error from (None if is_refusal(failure) else failure)  # the daemon's sentence is whole
        self._left -= 1
        pause_s = self._pause_s
        self._pause_s *= 2
        return pause_s


def is_broken_way(failure: grpc.RpcError, error: CacheClientError) -> bool:
    """True when the connection broke; what the daemon itself refused is final."""
    return isinstance(error, DaemonUnavailable) and not is_refusal(failure)
