"""What the command line says of a daemon's devices."""

from __future__ import annotations

from cachesvc_ctl.questions.status import describe_device
from kvcache.v1 import admin_pb2


def test_a_link_that_was_not_measured_is_not_shown_as_one_of_no_speed() -> None:
    device = admin_pb2.DeviceStatus(uuid="GPU-1", name="a GPU", pool_bytes=1 << 30, context_bytes=300 << 20)
    said = describe_device(device)
    assert said.endswith("300.00 MiB beside it, link not measured (calibration never)")
    device.load_gb_per_second, device.store_gb_per_second, device.both_gb_per_second = 54.7, 55.1, 95.7
    device.narrow_plane_bytes = 12 << 10
    said = describe_device(device)
    assert "link 54.7 GB/s in, 55.1 out, 95.7 both; planes under 12.00 KiB" in said
