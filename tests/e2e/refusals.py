"""Calls that must be refused: what the caller gets, as the client's typed error and as the gRPC status."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc
from cachesvc_client import CacheClientError
from cachesvc_client.core.errors import error_of
from kvcache.v1 import admin_pb2_grpc, cache_pb2, cache_pb2_grpc, engine_pb2_grpc, lease_pb2_grpc


class Refusal(NamedTuple):
    """End of a call. ``status`` is None where the client itself refused, without asking."""

    error: CacheClientError
    status: grpc.StatusCode | None


def refusal_of(call: Callable[[], Any]) -> Refusal:
    """Run a call that must fail, through the client or through a bare stub."""
    try:
        answer = call()
    except CacheClientError as error:
        return Refusal(error, status_of(error.__cause__ or error.__context__))
    except grpc.RpcError as failure:
        return Refusal(error_of(failure), status_of(failure))
    raise AssertionError(f"it was not refused: {answer}")


def status_of(failure: BaseException | None) -> grpc.StatusCode | None:
    """The status of a failed RPC; what gRPC raises is a grpc.Call too, which its types do not tell."""
    status: Callable[[], grpc.StatusCode] | None = getattr(failure, "code", None)
    return status() if status is not None else None


class Bare:
    """Stubs without the client's own checks and limits: what a client of another kind might send."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.engine = engine_pb2_grpc.EngineServiceStub(channel)
        self.lease = lease_pb2_grpc.LeaseServiceStub(channel)
        self.cache = cache_pb2_grpc.CacheServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)

    def step(self, request: cache_pb2.StepRequest) -> cache_pb2.StepResponse:
        """One step on a stream of its own."""
        (answer,) = self.cache.Step(iter([request]))
        return answer


@contextmanager
def bare_stubs(socket: str) -> Iterator[Bare]:
    """A channel without limits of its own."""
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"unix:{socket}", options=options) as channel:
        yield Bare(channel)
