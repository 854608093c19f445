"""The one seam to gRPC: channels to the daemon's socket. Tests put a server of their own behind it."""

from __future__ import annotations

from typing import Protocol

import grpc
import grpc.aio

from cachesvc.model.text.addresses import unix_target
from cachesvc_client.wire.settings import ChannelOptions


class ChannelMaker(Protocol):
    """Opens a channel for calls that block."""

    def __call__(self, socket_path: str, options: ChannelOptions) -> grpc.Channel:
        """A channel that connects on first use."""


class AsyncChannelMaker(Protocol):
    """Opens a channel for calls that are awaited."""

    def __call__(self, socket_path: str, options: ChannelOptions) -> grpc.aio.Channel:
        """A channel of the running loop."""


def open_channel(socket_path: str, options: ChannelOptions) -> grpc.Channel:
    """A channel to the unix socket at ``socket_path``; it connects on first use."""
    return grpc.insecure_channel(unix_target(socket_path), options=options.as_grpc())


def open_async_channel(socket_path: str, options: ChannelOptions) -> grpc.aio.Channel:
    """Open a channel for the running event loop."""
    return grpc.aio.insecure_channel(unix_target(socket_path), options=options.as_grpc())
