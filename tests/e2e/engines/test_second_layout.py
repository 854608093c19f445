"""A second layout under a model's name, which gets the scraps of the pools, is a line of status."""

from __future__ import annotations

from cachesvc_client import CacheClient, opaque
from kvcache.v1 import admin_pb2

from tests.e2e.rig import Node, running_node

LARGE, SMALL = opaque(block_bytes=1 << 20, block_tokens=16), opaque(block_bytes=4096, block_tokens=16)


def told(node: Node) -> list[str]:
    """Lines of its status about names that two layouts have."""
    attention = node.admin.GetStatus(admin_pb2.GetStatusRequest()).attention
    return [line for line in attention if "another layout" in line]


def test_a_second_layout_with_the_scraps_of_the_pools_is_told() -> None:
    with running_node() as node, CacheClient(node.socket) as client:
        client.register("m@1", LARGE, device_pages=[63], host_pages=[63])
        client.register("other", SMALL, device_pages=[8], host_pages=[8])
        assert told(node) == [], "another name is another model"
        client.register("m@1", SMALL, device_pages=[16], host_pages=[0])
        on_devices, on_host = told(node)
        assert "model 3 (m@1) has 65536 of " in on_devices
        assert "model 3 (m@1) has 0 of " in on_host
        assert "first with another layout (model 1)" in on_host


def test_two_layouts_with_a_fair_share_each_are_not_told() -> None:
    with running_node() as node, CacheClient(node.socket) as client:
        client.register("m@1", LARGE, device_pages=[30], host_pages=[30])
        client.register("m@1", SMALL, device_pages=[4096], host_pages=[4096])
        assert told(node) == []
