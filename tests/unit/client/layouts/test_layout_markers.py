"""Layouts in which everything has a window: a byte a block marks what a prefix is matched by, and is in every sum."""

from __future__ import annotations

import pytest
from cachesvc_client.layouts.families import (
    gqa,
    gqa_head_windows,
    gqa_windowed,
    mla_windowed,
    tensor_names,
    with_draft,
)
from cachesvc_ctl.layout import block_pages, fit, sequence_pages

from cachesvc.model.errors import LayoutRejected
from cachesvc.model.layout import (
    MARKER_GROUP,
    MARKER_PAGES,
    MARKER_PLANE,
    PLANE_ALIGN_BYTES,
    Layout,
    Plane,
    PlaneGroup,
    device_bytes,
    device_geometry,
    host_bytes,
)
from cachesvc.wire.convert import layout_from_proto, layout_to_proto

WINDOW = PlaneGroup("window", 9, 4)
K = Plane("k", 0, "window", (8,), "uint8")
ALONE = Layout(4, 2, (WINDOW,), (K,))
FULL = Layout(4, 2, (PlaneGroup("full"), WINDOW), (K, Plane("k", 1, "full", (8,), "uint8")))


def windows(layers: int, *, full: int = 0) -> Layout:
    marks = [True] * layers + [False] * full
    return gqa_windowed(window_layers=marks, kv_heads=1, head_dim=4, block_tokens=4, window_tokens=9)


def test_a_last_group_of_markers_is_added_where_every_group_has_a_window() -> None:
    assert (ALONE.groups, ALONE.planes) == ((WINDOW, MARKER_GROUP), (K, MARKER_PLANE))
    assert (ALONE.own_groups, ALONE.own_planes, ALONE.marker) == ((WINDOW,), (K,), 1)
    assert (ALONE.full_groups, ALONE.window_groups, ALONE.host_ranks(1)) == ((1,), (0,), 1)
    assert Layout(4, 2, ALONE.groups, ALONE.planes) == ALONE
    assert layout_from_proto(layout_to_proto(ALONE)).fingerprint == ALONE.fingerprint
    assert (FULL.marker, FULL.own_groups, FULL.own_planes) == (None, FULL.groups, FULL.planes)


def test_a_group_of_that_name_that_holds_something_is_no_marker() -> None:
    mine = Layout(4, 1, (WINDOW, MARKER_GROUP), (K, Plane("k", 1, "prefix", (8,), "uint8")))
    assert mine.marker is None
    assert mine.fill_pages((3,)) == (3,)
    with pytest.raises(LayoutRejected, match="'prefix' is listed twice"):
        Layout(4, 1, (PlaneGroup("prefix", 9),), (Plane("k", 0, "prefix", (8,), "uint8"),))


@pytest.mark.parametrize(
    "layout",
    [
        windows(3),
        mla_windowed(window_layers=[True] * 2, kv_lora_rank=128, rope_dim=8, block_tokens=4, window_tokens=9),
        gqa_head_windows(window_heads=[[True] * 2] * 2, head_dim=4, block_tokens=4, window_tokens=9, tensor_parallel=2),
    ],
)
def test_every_family_may_have_windows_alone(layout: Layout) -> None:
    assert [group.name for group in layout.groups] == ["window", "prefix"]
    assert len(tensor_names(layout, 0, 0)) == len(layout.own_planes)


def test_a_draft_brings_no_markers_into_a_layout_that_needs_none() -> None:
    def names(layout: Layout) -> list[str]:
        return [group.name for group in layout.groups]

    full = gqa(layers=2, kv_heads=1, head_dim=4, block_tokens=4)
    assert names(with_draft(full, windows(1))) == ["full", "draft_window"]
    assert names(with_draft(windows(2), windows(1, full=1))) == ["window", "draft_full", "draft_window"]
    assert names(with_draft(windows(2), windows(1))) == ["window", "draft_window", "prefix"]
    assert with_draft(windows(2), windows(1)).layers == 3


@pytest.mark.parametrize("pages", [1, 7, 64])
def test_the_estimate_has_the_markers_whether_named_or_not(pages: int) -> None:
    markers = MARKER_PAGES * pages
    assert ALONE.fill_pages((pages,)) == (pages, markers)
    assert ALONE.fill_pages((pages, 5)) == (pages, 5)
    allocated = [device_geometry(ALONE, group, count).total_bytes for group, count in enumerate((pages, markers))]
    assert allocated[1] == -(-markers // PLANE_ALIGN_BYTES) * PLANE_ALIGN_BYTES
    assert device_bytes(ALONE, (pages,)) == device_bytes(ALONE, (pages, markers)) == sum(allocated)
    assert ALONE.fill_host_pages((pages,)) == (pages, pages)
    assert host_bytes(ALONE, (pages,)) == host_bytes(ALONE, (pages, pages)) == 2 * 8 * pages + pages


def test_what_fits_counts_a_marker_for_each_block_of_a_sequence() -> None:
    assert sequence_pages(ALONE, 4000) == (1 + ALONE.window_blocks(0), 1000)
    fitted = fit(ALONE, sequence_pages(ALONE, 4000), 1 << 20)
    assert fitted.used_bytes == device_bytes(ALONE, fitted.pages) <= 1 << 20
    assert device_bytes(ALONE, tuple((fitted.count + 1) * unit for unit in fitted.unit_pages)) > 1 << 20
    assert block_pages(ALONE) == (1, 1)
