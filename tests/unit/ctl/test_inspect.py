"""The command line's view of a daemon's devices, and of missing packages."""

from __future__ import annotations

import sys

import pytest
from cachesvc_ctl.blocks import Tree
from cachesvc_ctl.core.command import MissingExtraError
from cachesvc_ctl.main import parse
from cachesvc_ctl.status import describe_device
from cachesvc_ctl.top import Top
from kvcache.v1 import admin_pb2, status_pb2


def test_a_link_that_was_not_measured_is_not_shown_as_one_of_no_speed() -> None:
    device = status_pb2.DeviceStatus(uuid="GPU-1", name="a GPU", pool_bytes=1 << 30, context_bytes=300 << 20)
    said = describe_device(device)
    assert said.endswith("300.00 MiB beside it\n  link not measured (calibration never)")
    device.load_gb_per_second, device.store_gb_per_second, device.both_gb_per_second = 54.7, 55.1, 95.7
    device.narrow_plane_bytes = 12 << 10
    said = describe_device(device)
    assert "link 54.7 GB/s in, 55.1 out, 95.7 both; planes under 12.00 KiB" in said


def test_a_device_that_was_broken_at_the_start_has_no_name_yet() -> None:
    said = describe_device(status_pb2.DeviceStatus(uuid="GPU-1", pool_bytes=1 << 30))
    assert said == "GPU-1: pool 1.00 GiB, 0 B beside it\n  link not measured (broken when the daemon started)"


@pytest.mark.parametrize("module", ["rich.text", "textual.app"])
def test_top_names_what_its_extra_brings(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cachesvc_ctl.top_app", raising=False)
    monkeypatch.setitem(sys.modules, module, None)  # what an import finds where nothing is installed
    with pytest.raises(MissingExtraError, match=r"the Python module textual, .* pip install 'cachesvc\[top\]'"):
        Top(parse(["top"])).run()


@pytest.mark.parametrize(
    ("limit", "depths", "truncated", "hint"),
    [
        (3, [0, 1, 1], False, ""),
        (3, [0, 1, 1, 1], True, "(more are there; raise --limit)"),
        (3, [0, 1, 2], True, "(more are there; raise --depth)"),
        (3, [0, 1, 2, 2], True, "(more are there; raise --depth and --limit)"),
        (4096, [0] * 4096, True, "(more are there)"),
        (4096, [0, 1, 2], True, "(more are there; raise --depth)"),
    ],
)
def test_a_tree_tells_which_bound_held_it_back(limit: int, depths: list[int], truncated: bool, hint: str) -> None:
    """Every node has a child; at depth 2 the children were not asked for."""
    nodes = [admin_pb2.TreeNode(depth=depth, children=1) for depth in depths]
    shown = Tree(parse(["tree", "--limit", str(limit), "--depth", "3"])).show(
        admin_pb2.GetTreeResponse(nodes=nodes, truncated=truncated)
    )
    assert shown.splitlines()[min(limit, len(nodes)) :] == ([hint] if hint else [])
