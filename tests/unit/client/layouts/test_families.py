"""Attention families: the specification's bytes, and that what is estimated is what is allocated, for every one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from cachesvc_client.layouts.families import (
    IndexPage,
    dsa,
    gqa,
    gqa_head_windows,
    gqa_windowed,
    mla,
    mla_windowed,
    opaque,
    packed_row_bytes,
    with_draft,
)

from cachesvc.model.errors import LayoutRejected
from cachesvc.model.layout import (
    ITEM_BYTES,
    PLANE_ALIGN_BYTES,
    Layout,
    device_bytes,
    device_geometry,
    host_bytes,
    host_geometry,
)

NUMPY = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def ernie(dtype: str = "bfloat16", scale_dtype: str | None = None, tp: int = 1) -> Layout:
    """ERNIE-4.5-21B-A3B."""
    return gqa(
        layers=28,
        kv_heads=4,
        head_dim=128,
        block_tokens=64,
        dtype=dtype,
        scale_dtype=scale_dtype,
        tensor_parallel=tp,
    )


def deepseek_v3(layers: int = 61, tp: int = 1) -> Layout:
    return mla(layers=layers, kv_lora_rank=512, rope_dim=64, block_tokens=64, tensor_parallel=tp)


def deepseek_v32(layers: int = 61, tp: int = 1, index_page: IndexPage = IndexPage.SPLIT) -> Layout:
    return dsa(
        layers=layers,
        kv_lora_rank=512,
        rope_dim=64,
        index_head_dim=128,
        block_tokens=64,
        index_page=index_page,
        tensor_parallel=tp,
    )


def latent_mix(windowed: int = 46, full: int = 15, tp: int = 1) -> Layout:
    return mla_windowed(
        window_layers=[True] * windowed + [False] * full,
        kv_lora_rank=512,
        rope_dim=64,
        block_tokens=64,
        window_tokens=512,
        tensor_parallel=tp,
    )


def head_mix(tp: int = 1) -> Layout:
    heads = [[True, False, True, False], [False] * 4, [True] * 4, [True, True, True, True]]
    return gqa_head_windows(
        window_heads=heads, head_dim=16, block_tokens=16, window_tokens=64, sink_tokens=32, tensor_parallel=tp
    )


def layer_mix(tp: int = 1) -> Layout:
    return gqa_windowed(
        window_layers=[True, False, True, False],
        kv_heads=8,
        head_dim=64,
        block_tokens=64,
        window_tokens=128,
        dtype="int8",
        scale_dtype="float32",
        tensor_parallel=tp,
    )


FAMILIES: dict[str, Callable[[], Layout]] = {
    "gqa bf16": ernie,
    "gqa fp16, tp 2": lambda: ernie("float16", tp=2),
    "gqa int8, float32 scales, tp 4": lambda: ernie("int8", "float32", tp=4),
    "gqa fp8, bf16 scales": lambda: ernie("float8_e4m3fn", "bfloat16"),
    "mla": deepseek_v3,
    "mla, tp 8": lambda: deepseek_v3(tp=8),
    "dsa": deepseek_v32,
    "dsa, fused index": lambda: deepseek_v32(index_page=IndexPage.FUSED),
    "mla with windows": latent_mix,
    "layers with windows, tp 2": lambda: layer_mix(2),
    "heads with windows, tp 2": lambda: head_mix(2),
    "heads with windows": head_mix,
    "mla and mtp": lambda: with_draft(deepseek_v3(tp=8), deepseek_v3(1, tp=8)),
    "dsa and mtp": lambda: with_draft(deepseek_v32(), deepseek_v32(1)),
    "odd sizes": lambda: gqa(
        layers=3, kv_heads=3, head_dim=5, block_tokens=7, dtype="float8_e5m2", scale_dtype="float16"
    ),
    "opaque": lambda: opaque(block_bytes=36, block_tokens=4, layers=3),
}

# Specification 0.2 at 64 tokens a block: bytes a token and a block in layer 0, and in all layers.
GOLDEN: dict[str, tuple[Layout, tuple[int, int, int, int]]] = {
    "DeepSeek-V3": (deepseek_v3(), (1152, 73_728, 70_272, 4_497_408)),
    "DeepSeek-V3 and one MTP layer": (
        with_draft(deepseek_v3(), deepseek_v3(1)),
        (1152, 73_728, 71_424, 4_571_136),
    ),
    "DeepSeek-V3.2": (deepseek_v32(), (788, 50_432, 48_068, 3_076_352)),
    "DeepSeek-V3.2, index in one plane": (
        deepseek_v32(index_page=IndexPage.FUSED),
        (788, 50_432, 48_068, 3_076_352),
    ),
    "46 windowed and 15 full latent layers": (latent_mix(), (656, 41_984, 47_456, 3_037_184)),
    "ERNIE-4.5-21B-A3B": (ernie(), (2048, 131_072, 57_344, 3_670_016)),
    "ERNIE in fp8, bf16 scales": (ernie("float8_e4m3fn", "bfloat16"), (1040, 66_560, 29_120, 1_863_680)),
    "ERNIE in fp8, fp32 scales": (ernie("float8_e4m3fn", "float32"), (1056, 67_584, 29_568, 1_892_352)),
    "ERNIE in int8, fp32 scales": (ernie("int8", "float32"), (1056, 67_584, 29_568, 1_892_352)),
}


def block_bytes(layout: Layout) -> int:
    return sum(layout.page_bytes(group) for group in range(len(layout.groups)))


@pytest.mark.parametrize(("layout", "golden"), GOLDEN.values(), ids=GOLDEN)
def test_the_bytes_of_the_specification(layout: Layout, golden: tuple[int, int, int, int]) -> None:
    first_layer = sum(plane.page_bytes for plane in layout.planes if plane.layer == 0)
    assert (first_layer // 64, first_layer, block_bytes(layout) // 64, block_bytes(layout)) == golden
    assert first_layer % 64 == block_bytes(layout) % 64 == 0


def test_what_the_specification_says_of_the_parts() -> None:
    assert packed_row_bytes(512, 64) == 656
    pages = {plane.name: (plane.page_shape, plane.page_bytes) for plane in deepseek_v32(1).planes}
    assert pages == {
        "latent": ((1, 64, 656), 41_984),
        "index_key": ((64, 128), 8_192),
        "index_scale": ((64, 4), 256),
    }
    fused = deepseek_v32(1, index_page=IndexPage.FUSED).planes[1]
    assert (fused.name, fused.page_shape, fused.page_bytes) == ("index", (8_448,), 8_448)
    assert {plane.dtype for plane in deepseek_v32().planes} == {"uint8"}
    assert round(100 * block_bytes(latent_mix()) / block_bytes(deepseek_v3()), 1) == 67.5
    kinds = {(plane.layer < 46, plane.group, plane.page_shape, plane.dtype) for plane in latent_mix().planes}
    assert kinds == {
        (True, "window", (1, 64, 656), "uint8"),
        (False, "full", (1, 64, 576), "bfloat16"),
    }


def test_a_page_of_the_host_has_all_index_values_before_their_scales() -> None:
    spans = {span.plane.name: span for span in host_geometry(deepseek_v32(1), 0, 3).spans}
    assert spans["index_scale"].offset - spans["index_key"].offset == 8_192
    assert {span.page_stride for span in spans.values()} == {50_432}


@pytest.mark.parametrize("block_tokens", [16, 32, 64, 128])
@pytest.mark.parametrize("mtp", [0, 1])
def test_the_formulas_of_the_specification(block_tokens: int, mtp: int) -> None:
    """0.5, with the scales that upstream leaves out."""
    heads = partial(gqa, kv_heads=8, head_dim=128, block_tokens=block_tokens)
    latent = partial(mla, kv_lora_rank=512, rope_dim=64, block_tokens=block_tokens)
    sparse = partial(dsa, kv_lora_rank=512, rope_dim=64, index_head_dim=128, block_tokens=block_tokens)
    key_values = 2 * block_tokens * 128 * 8
    cases = [
        (heads, 2 * key_values),
        (partial(heads, dtype="int8", scale_dtype="float32"), key_values + 2 * 8 * block_tokens * 4),
        (latent, 2 * (512 + 64) * block_tokens),
        (sparse, (512 + 4 * (512 // 128) + 2 * 64 + 128 + 4 * (128 // 128)) * block_tokens),
    ]
    for build, layer_bytes in cases:
        target = build(layers=10)
        layout = with_draft(target, build(layers=mtp)) if mtp else target
        assert block_bytes(layout) == layer_bytes * (10 + mtp)
        draft_bytes = sum(
            layout.page_bytes(i) for i, group in enumerate(layout.groups) if group.name.startswith("draft_")
        )
        assert draft_bytes == layer_bytes * mtp


@pytest.mark.parametrize("family", FAMILIES)
def test_the_estimate_is_what_is_allocated(family: str) -> None:
    layout, chance = FAMILIES[family](), random.Random(family)
    for _ in range(3):
        counts = tuple(chance.randint(1, 9) for _ in layout.groups)
        slabs, stored = 0, 0
        for group, count in enumerate(counts):
            geometry = device_geometry(layout, group, count)
            copies = 1 if layout.groups[group].replicated else layout.ranks
            end = 0
            for span in geometry.spans:
                plane = span.plane
                tensor = np.empty((count, *plane.page_shape), NUMPY.get(plane.dtype, plane.dtype))
                assert tensor.nbytes == count * span.page_stride == count * plane.page_bytes
                assert span.offset == end
                end = span.offset + -(-tensor.nbytes // PLANE_ALIGN_BYTES) * PLANE_ALIGN_BYTES
                stored += tensor.nbytes * copies
            assert geometry.total_bytes == end
            slabs += end
        assert device_bytes(layout, counts) == slabs
        assert host_bytes(layout, counts) == stored


def test_families_tell_their_fingerprints_apart() -> None:
    layouts = [build() for build in FAMILIES.values()]
    others = [
        gqa(layers=61, kv_heads=1, head_dim=576, block_tokens=64),
        latent_mix(45, 16),
        replace(latent_mix(), groups=(latent_mix().groups[0], replace(latent_mix().groups[1], window_tokens=513))),
        with_draft(deepseek_v3(60), deepseek_v3(1)),
        deepseek_v3(62),
        ernie("float8_e4m3fn", "float32"),
        ernie("float8_e4m3fn"),
        ernie("float8_e5m2"),
    ]
    fingerprints = [layout.fingerprint for layout in layouts + others]
    assert len(set(fingerprints)) == len(fingerprints)
    assert [build().fingerprint for build in FAMILIES.values()] == fingerprints[: len(layouts)]


def test_layers_without_a_window_are_the_plain_family() -> None:
    plain = gqa(layers=2, kv_heads=4, head_dim=8, block_tokens=4)
    layers = gqa_windowed(window_layers=[False] * 2, kv_heads=4, head_dim=8, block_tokens=4, window_tokens=8)
    assert layers == plain
    heads = gqa_head_windows(window_heads=[[False] * 4] * 2, head_dim=8, block_tokens=4, window_tokens=8)
    assert heads == plain
    assert heads.fingerprint == plain.fingerprint
    assert latent_mix(0, 3) == deepseek_v3(3)


def test_a_draft_comes_behind_its_target_with_a_page_count_of_its_own() -> None:
    draft = gqa(layers=2, kv_heads=8, head_dim=64, block_tokens=64, tensor_parallel=8)
    layout = with_draft(latent_mix(2, 1, tp=8), draft)
    assert [group.name for group in layout.groups] == ["full", "window", "draft_full"]
    assert [group.replicated for group in layout.groups] == [True, True, False]
    assert [(plane.layer, plane.name, plane.group) for plane in layout.planes[3:]] == [
        (3, "k", "draft_full"),
        (3, "v", "draft_full"),
        (4, "k", "draft_full"),
        (4, "v", "draft_full"),
    ]
    assert layout.layers == 5
    assert device_bytes(layout, (10, 4, 6)) - device_bytes(layout, (10, 4, 0)) == 6 * draft.page_bytes(0)
    for other in (replace(draft, ranks=4), gqa(layers=1, kv_heads=8, head_dim=64, block_tokens=32, tensor_parallel=8)):
        with pytest.raises(LayoutRejected, match="shares its target's blocks and ranks"):
            with_draft(deepseek_v3(tp=8), other)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: ernie(tp=3), "4 kv heads do not divide over 3 ranks"),
        (lambda: ernie(tp=8), "4 kv heads do not divide over 8 ranks"),
        (lambda: ernie(tp=0), "over 0 ranks"),
        (lambda: layer_mix(16), "8 kv heads do not divide over 16 ranks"),
        (lambda: head_mix(3), "4 kv heads do not divide over 3 ranks"),
        (lambda: head_mix(0), "over 0 ranks"),
        (lambda: deepseek_v3(tp=0), "ranks must be in"),
        (lambda: deepseek_v3(0), "layers must be 1..4096, got 0"),
        (lambda: deepseek_v3(10**12), "layers must be 1..4096"),
        (lambda: latent_mix(0, 0), "layers must be"),
        (lambda: ernie("bfloat16", "float32"), "scales of float32 belong to values of one byte, not to bfloat16"),
        (lambda: ernie("int4"), "unknown dtype 'int4'"),
        (lambda: ernie("int8", "float5"), "unknown dtype 'float5'"),
        (
            lambda: dsa(layers=1, kv_lora_rank=500, rope_dim=64, index_head_dim=128, block_tokens=64),
            "kv_lora_rank must be a multiple of 128",
        ),
        (
            lambda: dsa(layers=1, kv_lora_rank=512, rope_dim=64, index_head_dim=64, block_tokens=64),
            "index_head_dim must be a multiple of 128",
        ),
        (lambda: gqa_head_windows(window_heads=[], head_dim=8, block_tokens=4, window_tokens=8), "layers must be"),
    ],
)
def test_what_cannot_be_built_is_named(build: Callable[[], Layout], words: str) -> None:
    with pytest.raises(LayoutRejected, match=words):
        build()


def test_every_dtype_has_its_size_here() -> None:
    assert {name: np.dtype(NUMPY.get(name, name)).itemsize for name in ITEM_BYTES} == ITEM_BYTES
