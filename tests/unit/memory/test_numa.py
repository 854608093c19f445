"""Topology from a made-up sysfs; placement with the real kernel where it can be had, and its refusals by
name."""

from __future__ import annotations

import errno
import logging
import mmap
from pathlib import Path

import pytest

from cachesvc.hardware import device_nodes
from cachesvc.memory import numa
from cachesvc.memory.extents import address_of
from cachesvc.memory.numa import NumaNode, Placement, bind, node_of_pci, nodes, parse_list, refusal


def sysfs_of(root: Path, count: int) -> Path:
    for index in range(count):
        folder = root / f"devices/system/node/node{index}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{index * 4}-{index * 4 + 2},{index * 4 + 3}\n")
        (folder / "distance").write_text(" ".join("10" if i == index else "21" for i in range(count)) + "\n")
    return root


def test_two_nodes(tmp_path: Path) -> None:
    assert nodes(sysfs_of(tmp_path, 2)) == (
        NumaNode(0, (0, 1, 2, 3), (10, 21)),
        NumaNode(1, (4, 5, 6, 7), (21, 10)),
    )


def test_nodes_are_sorted_by_number_and_an_unreadable_one_is_left_out(tmp_path: Path) -> None:
    sysfs_of(tmp_path, 12)
    (tmp_path / "devices/system/node/node3/cpulist").write_text("many\n")
    (tmp_path / "devices/system/node/node5/distance").unlink()
    assert [node.index for node in nodes(tmp_path)] == [0, 1, 2, 4, 6, 7, 8, 9, 10, 11]


def test_no_sysfs_is_no_nodes(tmp_path: Path) -> None:
    assert nodes(tmp_path) == ()


def test_this_machine_tells_what_it_has() -> None:
    assert all(node.distances for node in nodes())


@pytest.mark.parametrize(
    ("text", "want"),
    [("", ()), ("\n", ()), ("0\n", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), ("1,3-4,\n", (1, 3, 4))],
)
def test_lists(text: str, want: tuple[int, ...]) -> None:
    assert parse_list(text) == want


def test_the_node_of_a_device(tmp_path: Path) -> None:
    for address, node in (("0000:3b:00.0", "1"), ("0000:5e:00.0", "-1")):
        (tmp_path / "bus/pci/devices" / address).mkdir(parents=True)
        (tmp_path / "bus/pci/devices" / address / "numa_node").write_text(node + "\n")
    assert node_of_pci("0000:3B:00.0", tmp_path) == 1
    assert node_of_pci("0000:5e:00.0", tmp_path) is None
    assert node_of_pci("0000:ff:00.0", tmp_path) is None


def test_devices_by_their_nodes_where_there_are_several(tmp_path: Path) -> None:
    devices = {"GPU-a": "0000:3b:00.0", "GPU-b": "0000:5e:00.0", "GPU-c": "0000:86:00.0", "GPU-d": "0000:ff:00.0"}
    for root, count in ((tmp_path / "two", 2), (tmp_path / "one", 1)):
        for address, node in zip(devices.values(), ("0", "1", "-1"), strict=False):
            (root / "bus/pci/devices" / address).mkdir(parents=True)
            (root / "bus/pci/devices" / address / "numa_node").write_text(node + "\n")
        sysfs_of(root, count)
    assert device_nodes(devices, tmp_path / "two") == {"GPU-a": 0, "GPU-b": 1}
    assert device_nodes(devices, tmp_path / "one") == {}
    assert device_nodes({}, tmp_path / "two") == {}


def test_where_there_is_nothing_to_choose_nothing_is_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert bind(0, 4096, None) is Placement.NO_NODE
    with caplog.at_level(logging.INFO, logger=numa.__name__):
        for _ in range(3):
            assert bind(0, 4096, 77, sysfs=sysfs_of(tmp_path / str(_), 1)) is Placement.ONE_NODE
    assert len(caplog.records) == 1


def test_a_missing_library_is_told_and_not_fatal(tmp_path: Path) -> None:
    assert bind(0, 4096, 1, sysfs=sysfs_of(tmp_path, 2), library="libnowhere.so.9") is Placement.NO_LIBRARY


def test_with_the_library_the_kernel_decides(tmp_path: Path) -> None:
    """A made-up second node: the first one exists everywhere, the thousandth nowhere."""
    sysfs = sysfs_of(tmp_path, 2)
    view = memoryview(mmap.mmap(-1, 1 << 20))
    placed = bind(address_of(view), 1 << 20, 0, sysfs=sysfs)
    absent = bind(address_of(view), 1 << 20, 1000, sysfs=sysfs)
    view[:8] = b"still ok"
    assert placed in (
        Placement.PLACED,
        Placement.NO_LIBRARY,
        Placement.NOT_PERMITTED,
        Placement.NOT_SUPPORTED,
    )
    assert absent is (Placement.REFUSED if placed is Placement.PLACED else placed)


def test_refusals_by_name() -> None:
    assert refusal(errno.EPERM) is Placement.NOT_PERMITTED
    assert refusal(errno.ENOSYS) is Placement.NOT_SUPPORTED
    assert refusal(errno.EINVAL) is Placement.REFUSED
