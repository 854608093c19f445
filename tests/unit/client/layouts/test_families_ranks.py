"""Tensor parallelism: which rank holds which heads, what the tensors are called, and in which order they come."""

from __future__ import annotations

import random
import re

import pytest
from cachesvc_client.layouts.families import (
    IndexPage,
    dsa,
    even_window_heads,
    gqa,
    gqa_head_windows,
    head_places,
    mla,
    padding_bytes,
    split_heads,
    tensor_names,
    with_draft,
)

from cachesvc.model.errors import LayoutRejected
from cachesvc.model.layout import Layout, device_bytes

HEADS = 8
NAME = re.compile(r"(?P<stem>[a-z_]+?)_(?P<layer>\d+)(?:_(?P<group>[a-z_]+))?_rank(?P<rank>\d+)\.device(?P<device>\d+)")


def heads_of(*marks: str) -> list[list[bool]]:
    """``"w.w."``: heads 0 and 2 have a window."""
    return [[mark == "w" for mark in layer] for layer in marks]


def head_layout(marks: list[list[bool]] | tuple[tuple[bool, ...], ...], tp: int) -> Layout:
    return gqa_head_windows(
        window_heads=marks,
        head_dim=4,
        block_tokens=8,
        window_tokens=16,
        sink_tokens=8,
        dtype="int8",
        scale_dtype="float16",
        tensor_parallel=tp,
    )


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_ranks_have_all_heads_once(tp: int) -> None:
    chance = random.Random(tp)
    for _ in range(50):
        is_window = [chance.random() < 0.5 for _ in range(HEADS)]
        splits = [split_heads(is_window, tp, rank) for rank in range(tp)]
        held = [head for split in splits for head in split.full + split.window]
        assert sorted(held) == list(range(HEADS))
        assert all(is_window[head] for split in splits for head in split.window)
        assert not any(is_window[head] for split in splits for head in split.full)
        for rank, split in enumerate(splits):
            assert {head * tp // HEADS for head in split.full + split.window} == {rank}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_planes_hold_what_the_split_says(tp: int) -> None:
    marks = heads_of("w.w.w.w.", "........", "wwwwwwww", "w.ww.www")
    marks = [list(layer) for layer in even_window_heads(marks, tp)]
    layout = head_layout(marks, tp)
    for layer, is_window in enumerate(marks):
        split = split_heads(is_window, tp, 0)
        for group, heads in (("full", split.full), ("window", split.window)):
            planes = [plane for plane in layout.planes if (plane.layer, plane.group) == (layer, group)]
            assert [plane.name for plane in planes] == (["k", "v", "k_scale", "v_scale"] if heads else [])
            assert {plane.page_shape[0] for plane in planes} <= {len(heads)}
    whole = gqa(layers=4, kv_heads=8, head_dim=4, block_tokens=8, dtype="int8", scale_dtype="float16")
    assert sum(layout.page_bytes(group) for group in range(len(layout.groups))) * tp == whole.page_bytes(0)
    rule = layout.groups[layout.group_index["window"]] if "window" in layout.group_index else None
    assert rule is None or (rule.window_tokens, rule.sink_tokens) == (16, 8)


def test_ranks_that_differ_have_planes_for_the_most_heads_of_any_rank() -> None:
    """int8 rows of 8 tokens: 2 * 8 * 4 bytes of values and 2 * 8 * 2 of scales for each head and layer."""
    marks = heads_of("w.w.w.w.", "www.....")
    layout = head_layout(marks, 2)
    rows = {(plane.layer, plane.group): plane.page_shape[0] for plane in layout.planes}
    assert rows == {(0, "full"): 2, (0, "window"): 2, (1, "full"): 4, (1, "window"): 3}
    assert (layout.page_bytes(0), layout.page_bytes(1)) == (6 * 96, 5 * 96)
    assert padding_bytes(layout, marks) == (3 * 96, 3 * 96)
    places = [head_places(marks[1], 2, rank) for rank in range(2)]
    assert places[0] == (("window", 0), ("window", 1), ("window", 2), ("full", 0))
    assert places[1] == (("full", 0), ("full", 1), ("full", 2), ("full", 3))
    even = even_window_heads(marks, 2)
    assert even == (tuple(marks[0]), (False,) * 8)
    assert even_window_heads(heads_of("ww.w..w."), 2) == (tuple(heads_of("w.....w.")[0]),)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_head_has_a_row_of_its_own_and_what_is_left_is_told(tp: int) -> None:
    chance = random.Random(tp)
    for _ in range(50):
        marks = [[chance.random() < 0.4 for _ in range(HEADS)] for _ in range(3)]
        layout = head_layout(marks, tp)
        rows = {(plane.layer, plane.group): plane.page_shape[0] for plane in layout.planes}
        for layer, is_window in enumerate(marks):
            for rank in range(tp):
                places = head_places(is_window, tp, rank)
                assert len(set(places)) == len(places) == HEADS // tp
                assert all(place.row < rows[layer, place.group] for place in places)
                mine = is_window[rank * HEADS // tp : (rank + 1) * HEADS // tp]
                assert [place.group == "window" for place in places] == mine
        padding = padding_bytes(layout, marks)
        whole = sum(layout.page_bytes(group) for group in range(len(layout.groups))) * tp
        assert whole - sum(padding) == 3 * HEADS * 96
        assert tp > 1 or not any(padding)
        evened = head_layout(even_window_heads(marks, tp), tp)
        assert sum(evened.page_bytes(group) for group in range(len(evened.groups))) * tp <= whole
        counts = tuple(11 for _ in layout.groups)
        assert device_bytes(layout, counts) == sum(-(-11 * plane.page_bytes // 256) * 256 for plane in layout.planes)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_evening_out_keeps_windows_where_it_can_and_never_makes_one(tp: int) -> None:
    chance = random.Random(tp)
    for _ in range(50):
        marks = [[chance.random() < 0.6 for _ in range(HEADS)]]
        (even,) = even_window_heads(marks, tp)
        counts = [len(split_heads(marks[0], tp, rank).window) for rank in range(tp)]
        assert [len(split_heads(even, tp, rank).window) for rank in range(tp)] == [min(counts)] * tp
        assert all(before or not after for before, after in zip(marks[0], even, strict=True))


@pytest.mark.parametrize("tp", [0, -1, 3, 16])
def test_heads_that_do_not_divide_are_refused(tp: int) -> None:
    for call in (
        lambda: split_heads([True] * HEADS, tp, 0),
        lambda: even_window_heads([[True] * HEADS], tp),
        lambda: head_places([True] * HEADS, tp, 0),
        lambda: head_layout(heads_of("wwww...."), tp),
    ):
        with pytest.raises(LayoutRejected, match=f"8 kv heads do not divide over {tp} ranks"):
            call()
    with pytest.raises(LayoutRejected, match="rank 2 is none of 2"):
        split_heads([True] * HEADS, 2, 2)


def small_dsa(tp: int, index_page: IndexPage = IndexPage.SPLIT) -> Layout:
    return dsa(
        layers=2,
        kv_lora_rank=512,
        rope_dim=64,
        index_head_dim=128,
        block_tokens=64,
        index_page=index_page,
        tensor_parallel=tp,
    )


def test_the_names_of_the_specification() -> None:
    scaled = gqa(
        layers=2, kv_heads=2, head_dim=8, block_tokens=4, dtype="int8", scale_dtype="float32", tensor_parallel=2
    )
    assert list(tensor_names(scaled, rank=1, device=5))[:5] == [
        "key_caches_0_rank1.device5",
        "value_caches_0_rank1.device5",
        "key_cache_scales_0_rank1.device5",
        "value_cache_scales_0_rank1.device5",
        "key_caches_1_rank1.device5",
    ]
    sparse = small_dsa(2, IndexPage.FUSED)
    assert list(tensor_names(with_draft(sparse, sparse), rank=0, device=0))[3:5] == [
        "indexer_caches_1_rank0.device0",
        "key_caches_2_rank0.device0",
    ]
    mixed = head_layout(heads_of("w.......", "........"), 1)
    assert [name for name in tensor_names(mixed, rank=0, device=0) if name.startswith("key_caches")] == [
        "key_caches_0_full_rank0.device0",
        "key_caches_0_window_rank0.device0",
        "key_caches_1_rank0.device0",
    ]


GRID = [
    gqa(layers=3, kv_heads=4, head_dim=8, block_tokens=4, dtype="int8", scale_dtype="float32", tensor_parallel=2),
    mla(layers=12, kv_lora_rank=512, rope_dim=64, block_tokens=64, tensor_parallel=2),
    small_dsa(2),
    small_dsa(2, IndexPage.FUSED),
    with_draft(small_dsa(2), small_dsa(2)),
    head_layout(heads_of("w.w.w.w.", "wwwwwwww", "........"), 2),
]


@pytest.mark.parametrize("layout", GRID, ids=lambda layout: f"{layout.planes[0].name}-{len(layout.planes)}")
def test_names_and_tensors_match_one_to_one_over_dp2_x_tp2(layout: Layout) -> None:
    named: dict[str, tuple[str, int, int]] = {}
    for device in range(4):
        rank = device % layout.ranks
        for name, plane in tensor_names(layout, rank, device).items():
            assert name not in named
            named[name] = (plane.label, rank, device)
            parts = NAME.fullmatch(name)
            assert parts is not None
            assert (int(parts["layer"]), int(parts["rank"]), int(parts["device"])) == (plane.layer, rank, device)
            assert parts["group"] in (None, plane.group)
    wanted = {(plane.label, device % 2, device) for plane in layout.planes for device in range(4)}
    assert set(named.values()) == wanted
    assert len(named) == 4 * len(layout.planes)


def test_a_raw_rank_beyond_tensor_parallelism_is_refused() -> None:
    """Upstream created names with the rank modulo tp and looked them up without."""
    for rank in (-1, 2, 3):
        with pytest.raises(LayoutRejected, match=f"rank {rank} is none of 2; take the rank within"):
            tensor_names(GRID[0], rank, 3)


def test_planes_come_in_the_order_of_the_forward_pass() -> None:
    order = [[(plane.layer, plane.name) for plane in layout.planes] for layout in GRID[:4]]
    assert order[0] == [(layer, name) for layer in range(3) for name in ("k", "v", "k_scale", "v_scale")]
    assert order[1] == [(layer, "latent") for layer in range(12)]
    assert order[2] == [(layer, name) for layer in range(2) for name in ("latent", "index_key", "index_scale")]
    assert order[3] == [(layer, name) for layer in range(2) for name in ("latent", "index")]
