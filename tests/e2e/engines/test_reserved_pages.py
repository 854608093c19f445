"""Reserved pages: the engines' own bytes at the head of every pool, which the daemon never grants, counts or copies."""

from __future__ import annotations

import pytest
from cachesvc_client import CacheClient, Conflict, PoolExhausted, block_keys
from kvcache.v1 import admin_pb2

from tests.e2e.engine import BLOCK_TOKENS, WINDOWED, prompt
from tests.e2e.rig import Node

PAGES = 8
RESERVED = 2


@pytest.mark.usefixtures("each_way")
def test_reserved_pages_are_never_granted_and_keep_what_engines_write(node: Node) -> None:
    with CacheClient(node.socket) as client:
        groups = len(WINDOWED.groups)
        each = [PAGES] * groups
        model = client.register("model@1", WINDOWED, device_pages=each, host_pages=each, reserved_pages=RESERVED)
        assert (model.device_pages, model.reserved_pages) == ((PAGES,) * groups, RESERVED)
        lease = client.open_lease(model)
        pool = lease.attach()
        own = {name: pool.group_planes(name) for name in ("full", "window")}
        for planes in own.values():
            for plane in planes.values():
                plane[:RESERVED] = 7
        for seed in range(4):  # all pages are granted, evicted and granted again
            keys = block_keys(model.namespace, prompt(seed, PAGES - RESERVED), BLOCK_TOKENS)
            with lease.match(keys) as sequence:
                sequence.allocate(PAGES - RESERVED)
                assert {*sequence.tables[0].tolist()} == {*range(RESERVED, PAGES)}
                with lease.match(b"") as other, pytest.raises(PoolExhausted, match=r"1 pages, free 0, .*capacity 6"):
                    other.allocate(1)
                sequence.publish(PAGES - RESERVED)
        assert node.problems() == []
        for status in node.admin.GetStatus(admin_pb2.GetStatusRequest()).pools:
            is_host = status.place == "host"
            assert (status.reserved, status.capacity) == ((0, PAGES) if is_host else (RESERVED, PAGES - RESERVED))
            assert status.free + status.sealed == status.capacity
        (listed,) = node.admin.ListModels(admin_pb2.ListModelsRequest()).models
        assert listed.reserved_pages == RESERVED
        assert all((plane[:RESERVED] == 7).all() for planes in own.values() for plane in planes.values())
        with pytest.raises(Conflict, match="is there with 2 reserved pages, not 1"):
            client.register("model@1", WINDOWED, reserved_pages=1)
        with pytest.raises(Conflict, match="is there with 2 reserved pages, not 0"):
            client.register("model@1", WINDOWED)
