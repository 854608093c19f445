"""A lease that processes share: asked for by its name, ids of one's own, and left by one's own token."""

from __future__ import annotations

import pytest
from cachesvc_client import CacheClient, NotSupported
from cachesvc_client.layouts.families import opaque

from tests.unit.rigs.client_rig import LEASE_ID, TOKEN, FakeDaemon

LAYOUT = opaque(block_bytes=64, block_tokens=4)
FIRST = 3 << 40


def test_each_process_has_ids_of_its_own_and_leaves_by_its_token(daemon: FakeDaemon) -> None:
    daemon.first_id = FIRST
    with CacheClient(daemon.path) as client:
        model = client.register("m", LAYOUT)
        lease = client.open_lease(model, instance="uuid")
        assert (lease.instance, lease.joined, lease.id) == ("uuid", True, LEASE_ID)
        assert client.open_lease(model, instance="uuid") is lease
        assert [opened.instance_id for opened in daemon.seen["Open"]] == ["uuid"]
        chosen, drawn = lease.match(b"", sequence_id=77), lease.match(b"")
        assert (chosen.id, drawn.id) == (FIRST + 77, FIRST + 1)
        assert [asked.request_id - FIRST for asked in daemon.seen["Match"]] == [1, 2]
        lease.close()
        assert [told.process_token for told in daemon.seen["Close"]] == [TOKEN]
        again = client.open_lease(model, instance="uuid")
        assert again is not lease
        again.close(for_all=True)
        alone = client.open_lease(model)
        assert (alone.instance, daemon.seen["Open"][-1].instance_id) == ("", "")
        alone.close()
        assert [told.process_token for told in daemon.seen["Close"]] == [TOKEN, b"", b""]


def test_a_daemon_that_knows_no_instances_is_told_of_and_keeps_nothing(daemon: FakeDaemon) -> None:
    daemon.knows_instances = False
    with CacheClient(daemon.path) as client:
        with pytest.raises(NotSupported, match="update it"):
            client.open_lease(client.register("m", LAYOUT), instance="uuid")
        assert [(told.lease_id, told.quiesced) for told in daemon.seen["Close"]] == [(LEASE_ID, True)]
