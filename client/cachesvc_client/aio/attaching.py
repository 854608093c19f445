"""Mapping of a rank's pool: the client reports it to the daemon before, and after the rank's last pool is unmapped."""

from __future__ import annotations

import logging

from kvcache.v1 import engine_pb2

from cachesvc_client.core.errors import (
    AlreadyClosed,
    DaemonUnavailable,
    DeadlineExceeded,
    LeaseLost,
    NotFound,
    Unauthenticated,
)
from cachesvc_client.core.registration import Registration
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.wire.connection import Connection
from cachesvc_client.wire.methods import ATTACH, DETACH

NEEDLESS = (AlreadyClosed, DaemonUnavailable, LeaseLost, NotFound, DeadlineExceeded, Unauthenticated)
"""Errors of a detach that do no harm."""

log = logging.getLogger(__name__)


async def attach_pool(connection: Connection, registration: Registration, lease_id: str, rank: int) -> AttachedPool:
    """Map one rank's pool for this process, under a lease that may be another process's."""
    token = connection.process_token
    request = engine_pb2.AttachRequest(lease_id=lease_id, rank=rank, process_token=token)
    connection.attachments.begin(lease_id, rank)
    try:
        attached = await connection.ask(ATTACH, request, connection.timeouts.attach_s)
    except BaseException:
        connection.attachments.end(lease_id, rank)
        raise

    async def detach() -> None:
        request = engine_pb2.DetachRequest(lease_id=lease_id, rank=rank, process_token=token)
        try:
            await connection.insist(DETACH, request, connection.timeouts.close_s)
        except NEEDLESS as gone:  # the caller needs no report
            log.debug("detach_needless lease=%s rank=%s why=%s", lease_id, rank, gone)

    def unmapped() -> None:
        if connection.attachments.end(lease_id, rank):
            connection.port.send_later(detach())

    pool = AttachedPool(registration.layout, rank, attached, connection.life, unmapped)
    try:
        await connection.port.in_thread(pool.start)
    except BaseException:
        await connection.port.in_thread(pool.close)
        raise
    return pool
