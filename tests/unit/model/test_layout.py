"""Layouts: the specification's byte counts, and that what is estimated is what is allocated."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise
from math import prod

import pytest
from cachesvc_client.layouts.families import gqa, gqa_windowed, mla, opaque

from cachesvc.model.errors import LayoutRejected
from cachesvc.model.layout import (
    ITEM_BYTES,
    PLANE_ALIGN_BYTES,
    Layout,
    Plane,
    PlaneGroup,
    device_bytes,
    device_geometry,
    host_bytes,
    host_geometry,
)
from tests.work import counted

ERNIE = gqa(layers=28, kv_heads=4, head_dim=128, block_tokens=64)
DEEPSEEK = mla(layers=61, kv_lora_rank=512, rope_dim=64, block_tokens=64, tensor_parallel=8)


def full(*planes: Plane) -> Layout:
    return Layout(64, 1, (PlaneGroup("full"),), planes)


def scaled(dtype: str) -> Layout:
    """ERNIE in fp8 with a scale for each head and token."""
    planes = []
    for layer in range(28):
        planes += [Plane(name, layer, "full", (4, 64, 128), "float8_e4m3fn") for name in ("k", "v")]
        planes += [Plane(name, layer, "full", (4, 64), dtype) for name in ("k_scale", "v_scale")]
    return full(*planes)


def packed(layers: int, *, indexer: bool) -> list[Plane]:
    planes = [Plane("latent", layer, "full", (1, 64, 656), "uint8") for layer in range(layers)]
    if indexer:
        planes += [Plane("index_key", layer, "full", (64, 128), "uint8") for layer in range(layers)]
        planes += [Plane("index_scale", layer, "full", (64, 4), "uint8") for layer in range(layers)]
    return planes


SWA_MIX = full(
    *packed(46, indexer=False), *(Plane("latent", 46 + i, "full", (1, 64, 576), "bfloat16") for i in range(15))
)


@pytest.mark.parametrize(
    ("layout", "layer_bytes", "block_bytes"),
    [
        (ERNIE, 131_072, 3_670_016),
        (scaled("bfloat16"), 66_560, 1_863_680),
        (scaled("float32"), 67_584, 1_892_352),
        (DEEPSEEK, 73_728, 4_497_408),
        (mla(layers=62, kv_lora_rank=512, rope_dim=64, block_tokens=64), 73_728, 4_571_136),
        (full(*packed(61, indexer=True)), 50_432, 3_076_352),
        (SWA_MIX, 41_984, 3_037_184),
    ],
)
def test_the_bytes_of_the_specification(layout: Layout, layer_bytes: int, block_bytes: int) -> None:
    assert sum(plane.page_bytes for plane in layout.planes if plane.layer == 0) == layer_bytes
    assert sum(layout.page_bytes(group) for group in range(len(layout.groups))) == block_bytes


def test_tensor_parallel_divides_heads_and_never_the_latent() -> None:
    assert gqa(layers=28, kv_heads=4, head_dim=128, block_tokens=64, tensor_parallel=4).page_bytes(0) == 3_670_016 // 4
    assert DEEPSEEK.page_bytes(0) == 4_497_408
    assert DEEPSEEK.host_ranks(0) == 1
    assert replace(ERNIE, ranks=4).host_ranks(0) == 4
    for heads, ranks in ((4, 3), (0, 1), (4, 0)):
        with pytest.raises(LayoutRejected):
            gqa(layers=1, kv_heads=heads, head_dim=8, block_tokens=4, tensor_parallel=ranks)


WINDOWED = gqa_windowed(
    window_layers=(False, True, True), kv_heads=3, head_dim=5, block_tokens=7, window_tokens=20, sink_tokens=9
)


@pytest.mark.parametrize(
    "layout", [ERNIE, DEEPSEEK, scaled("float32"), SWA_MIX, WINDOWED, opaque(block_bytes=12, block_tokens=4, layers=3)]
)
@pytest.mark.parametrize("pages", [1, 7, 64])
def test_the_estimate_is_what_is_allocated(layout: Layout, pages: int) -> None:
    counts = tuple(pages + group for group in range(len(layout.groups)))
    tensors = [prod((counts[layout.group_index[p.group]], *p.page_shape)) * ITEM_BYTES[p.dtype] for p in layout.planes]
    aligned = sum(-(-size // PLANE_ALIGN_BYTES) * PLANE_ALIGN_BYTES for size in tensors)
    assert device_bytes(layout, counts) == aligned
    stored = [
        size * (1 if layout.groups[layout.group_index[plane.group]].replicated else layout.ranks)
        for size, plane in zip(tensors, layout.planes, strict=True)
    ]
    assert host_bytes(layout, counts) == sum(stored)


@pytest.mark.parametrize("layout", [ERNIE, scaled("float32"), SWA_MIX, WINDOWED])
def test_no_two_pages_share_a_byte(layout: Layout) -> None:
    for group in range(len(layout.groups)):
        for geometry in (device_geometry(layout, group, 5), host_geometry(layout, group, 5)):
            spans = sorted(
                (span.offset + page * span.page_stride, span.width) for span in geometry.spans for page in range(5)
            )
            assert all(start + width <= after for (start, width), (after, _) in pairwise(spans))
            assert spans[-1][0] + spans[-1][1] <= geometry.total_bytes
            for _, alike in groupby(geometry.spans, key=lambda span: span.width):
                offsets = [span.offset for span in alike]
                assert len({after - before for before, after in pairwise(offsets)}) <= 1, "one pitch"


def test_groups_of_one_pool_lie_over_one_another_at_pages_of_their_own() -> None:
    groups = (PlaneGroup("full", pool="kv"), PlaneGroup("index"), PlaneGroup("window", 20, pool="kv"))
    widths = {"full": (8, 8, 4), "index": (3,), "window": (8, 8)}
    planes = tuple(
        Plane("k", layer, name, (width,), "uint8") for name, each in widths.items() for layer, width in enumerate(each)
    )
    layout = Layout(4, 1, groups, planes)
    assert layout.pools == ((0, 2), (1,))
    assert (layout.unit_pages, layout.pool_leads) == ((2, 1, 2), (0, 1, 0))
    assert device_bytes(layout, (128, 7, 128)) == 128 * 20 + 256
    offsets = [[span.offset for span in device_geometry(layout, group, 128).spans] for group in (0, 2)]
    assert offsets == [[0, 1024, 2048], [0, 1024]]
    assert layout.fingerprint != replace(layout, groups=tuple(replace(each, pool="") for each in groups)).fingerprint
    other = Layout(4, 1, groups, (*planes[:-1], replace(planes[-1], page_shape=(9,))))
    spans = [device_geometry(other, group, 128).spans for group in (0, 2)]
    assert [[span.offset for span in each] for each in spans] == [[0, 16, 32], [0, 16]], "a page lies in a row"
    assert {span.page_stride for each in spans for span in each} == {256}
    assert device_bytes(other, (128, 7, 128)) == 128 * 256 + 256
    with pytest.raises(LayoutRejected, match="pool name"):
        Layout(4, 1, (PlaneGroup("full", pool="a b"),), planes[:3])


def test_windows_in_blocks() -> None:
    assert (WINDOWED.full_groups, WINDOWED.window_groups) == ((0,), (1,))
    assert WINDOWED.sink_blocks(1) == 2
    assert WINDOWED.window_blocks(1) == 4
    for block_tokens in (1, 4):
        planes = tuple(Plane("k", 0, name, (8,), "uint8") for name in ("full", "ring"))
        scratch = Layout(block_tokens, 1, (PlaneGroup("full"), PlaneGroup("ring", 0)), planes)
        assert scratch.window_blocks(1) == 1, "the newest one"
    with pytest.raises(ValueError, match="no window"):
        WINDOWED.window_blocks(0)


def test_the_fingerprint_tells_layouts_apart() -> None:
    small = gqa(layers=2, kv_heads=2, head_dim=8, block_tokens=4)
    assert small.fingerprint.hex() == "b4c2e6ddf063129cb17f51e105728ba8ac5b4452e1fb48642c80ece02fad574f"
    others = [
        gqa(layers=2, kv_heads=2, head_dim=8, block_tokens=8),
        gqa(layers=3, kv_heads=2, head_dim=8, block_tokens=4),
        gqa(layers=2, kv_heads=2, head_dim=8, block_tokens=4, dtype="float16"),
        replace(small, ranks=2),
        replace(small, groups=(PlaneGroup("full", replicated=True),)),
        replace(WINDOWED, groups=(PlaneGroup("full"), PlaneGroup("window", 20, 8))),
        WINDOWED,
    ]
    assert len({layout.fingerprint for layout in (small, *others)}) == len(others) + 1
    assert gqa(layers=2, kv_heads=2, head_dim=8, block_tokens=4).fingerprint == small.fingerprint


K = Plane("k", 0, "full", (8,), "uint8")
FULL = PlaneGroup("full")


@pytest.mark.parametrize(
    ("block_tokens", "ranks", "groups", "planes"),
    [
        (0, 1, (FULL,), (K,)),
        (5000, 1, (FULL,), (K,)),
        (4, 0, (FULL,), (K,)),
        (4, 65, (FULL,), (K,)),
        (4, 1, (), (K,)),
        (4, 1, (FULL,), ()),
        (4, 1, (FULL, FULL), (K,)),
        (4, 1, (FULL, PlaneGroup("empty")), (K,)),
        (4, 1, (PlaneGroup("full", 8),), ()),
        (4, 1, tuple(PlaneGroup(f"w{i}", 8) for i in range(128)), tuple(replace(K, group=f"w{i}") for i in range(128))),
        (4, 1, (PlaneGroup("prefix", 8),), (replace(K, group="prefix"),)),
        (4, 1, (PlaneGroup("full", None, 4),), (K,)),
        (4, 1, (FULL, PlaneGroup("w", -1)), (K, replace(K, group="w"))),
        (4, 1, (FULL, PlaneGroup("w", 0, 4)), (K, replace(K, group="w"))),
        (4, 1, (FULL, PlaneGroup("w", 8, -1)), (K, replace(K, group="w"))),
        (4, 1, (PlaneGroup("fu ll"),), (replace(K, group="fu ll"),)),
        (4, 1, (FULL,), (K, K)),
        (4, 1, (FULL,), (replace(K, group="other"),)),
        (4, 1, (FULL,), (replace(K, dtype="float5"),)),
        (4, 1, (FULL,), (replace(K, name=""),)),
        (4, 1, (FULL,), (replace(K, name="n" * 65),)),
        (4, 1, (FULL,), (replace(K, layer=-1),)),
        (4, 1, (FULL,), (replace(K, page_shape=()),)),
        (4, 1, (FULL,), (replace(K, page_shape=(0,)),)),
        (4, 1, (FULL,), (replace(K, page_shape=(1,) * 7),)),
        (4, 1, (FULL,), (replace(K, page_shape=(1 << 30, 2)),)),
    ],
)
def test_what_cannot_be_built(
    block_tokens: int, ranks: int, groups: tuple[PlaneGroup, ...], planes: tuple[Plane, ...]
) -> None:
    with pytest.raises(LayoutRejected):
        Layout(block_tokens, ranks, groups, planes)


def test_the_bytes_of_a_block_cost_as_much_among_hundreds_of_planes_as_among_two() -> None:
    """Each transfer asks for them, on the event loop."""
    steps = []
    for layers in (1, 200):
        planes = tuple(Plane(name, layer, "full", (64, 8), "uint8") for layer in range(layers) for name in ("k", "v"))
        layout = Layout(16, 1, (PlaneGroup("full"),), planes)
        assert layout.page_bytes(0) == 2 * layers * 64 * 8
        with counted() as work:
            layout.page_bytes(0)
        steps.append(work.steps)
    assert steps[0] == steps[1]
