"""The daemon's layout has each of vLLM's pages at vLLM's own offset."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from cachesvc_client.plugins.keeper import ConnectorRefused
from cachesvc_vllm.cache_groups import place_wider_first, placement_of, slab_layout

from cachesvc.model.layout import device_bytes, device_geometry
from tests.unit.rigs.vllm_rig import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    blocks_outermost,
    layers_outermost,
    overlaid,
)


def starts(config: KVCacheConfig) -> list[tuple[int, int]]:
    """Beginnings of the planes in the slab, and the distance of their pages."""
    return [
        (span.offset, span.page_stride) for span in device_geometry(slab_layout(config), 0, config.num_blocks).spans
    ]


def target_and_drafter() -> KVCacheConfig:
    """Two layers of a target, and behind them a wider and a narrower one of a drafter."""
    size = 8 * (2 * 512 + 1024 + 256)
    tensors = [
        KVCacheTensor(size, ["a", "b"], 4096, 512, 0),
        KVCacheTensor(size, ["c"], 8192, 1024, 8192),
        KVCacheTensor(size, ["d"], 2048, 256, 16384),
    ]
    return KVCacheConfig(8, tensors)


def test_layer_after_layer_is_a_plane_for_each() -> None:
    assert starts(layers_outermost(8, 512, 3)) == [(0, 512), (4096, 512), (8192, 512)]
    assert slab_layout(layers_outermost()).block_tokens == 32


def test_layers_of_several_tensors_are_planes_too() -> None:
    tensors = [KVCacheTensor(3 * 4096, ["a"], 4096, 512, 8192), KVCacheTensor(3 * 4096, ["b", "c"], 4096, 512, 0)]
    assert starts(KVCacheConfig(8, tensors)) == [(0, 512), (4096, 512), (8192, 512)]


def test_block_after_block_is_one_plane() -> None:
    assert starts(blocks_outermost(8, 512, 3)) == [(0, 1536)]


def test_groups_lie_over_each_other_in_one_pool() -> None:
    config = overlaid(SlidingWindowSpec(), MambaSpec(), FullAttentionSpec())
    layout = slab_layout(config)
    assert [each.name for each in layout.groups] == ["window-0", "state-1", "full-2"]
    assert layout.pools == ((0, 1, 2),)
    assert [(each.window_tokens, each.is_state) for each in layout.groups] == [(64, False), (None, True), (None, False)]
    spans = [[span.offset for span in device_geometry(layout, group, 8).spans] for group in range(3)]
    assert spans == [[0, 4096], [0, 4096], [0]]
    assert device_bytes(layout, (8, 8, 8)) == config.kv_cache_tensors[0].size


def test_groups_of_blocks_in_a_row_have_a_plane_each() -> None:
    config = overlaid(SlidingWindowSpec(), FullAttentionSpec())
    for tensor in config.kv_cache_tensors:
        tensor.layer_stride, tensor.block_stride = 512, 1024
    layout = slab_layout(config)
    assert [plane.page_shape for plane in layout.planes] == [(1024,), (1024,)]
    assert device_bytes(layout, (8, 8)) == config.kv_cache_tensors[0].size


def test_a_drafter_that_is_wider_than_its_target_has_a_slab_too() -> None:
    config = target_and_drafter()
    with pytest.raises(ConnectorRefused, match="in a way that a slab"):
        slab_layout(config)
    place_wider_first(config)
    assert [tensor.offset for tensor in config.kv_cache_tensors] == [8192, 0, 16384]
    assert starts(config) == [(0, 1024), (8192, 512), (12288, 512), (16384, 256)]
    placed = [replace(tensor) for tensor in config.kv_cache_tensors]
    place_wider_first(config)
    assert config.kv_cache_tensors == placed


def test_layers_that_do_not_lie_one_after_another_stay_where_they_are() -> None:
    blocks, overlaid, apart = blocks_outermost(8, 512, 3), target_and_drafter(), target_and_drafter()
    overlaid.kv_cache_tensors[1].offset = 0
    apart.kv_cache_tensors[2].block_stride = 128
    for config in (blocks, overlaid, apart):
        before = [tensor.offset for tensor in config.kv_cache_tensors]
        place_wider_first(config)
        assert [tensor.offset for tensor in config.kv_cache_tensors] == before


def test_each_rank_has_a_slab_and_the_host_one_copy_of_what_all_ranks_compute() -> None:
    shards, latents = layers_outermost(), layers_outermost()
    latents.kv_cache_groups = [SimpleNamespace(kv_cache_spec=FullAttentionSpec(max_tp_shards=1))]
    for config, ranks, host_ranks in ((shards, 2, 2), (latents, 2, 1), (latents, 1, 1)):
        layout = slab_layout(config, ranks)
        assert (layout.ranks, layout.host_ranks(0)) == (ranks, host_ranks)
    assert slab_layout(latents, 1) == slab_layout(shards)


def test_stages_of_a_pipeline_have_slabs_alike_in_which_each_has_its_layers_first() -> None:
    configs = [layers_outermost(layers=each) for each in (2, 3, 1)]
    placed = [placement_of(each) for each in configs]
    layout = slab_layout(configs[0], 3, placed)
    assert [slab_layout(each, 3, placed) for each in configs] == [layout] * 3
    assert [span.offset for span in device_geometry(layout, 0, 8).spans] == [0, 4096, 8192]
    assert device_bytes(layout, (8,)) == configs[1].kv_cache_tensors[0].size


def test_a_stage_may_have_no_layer_of_a_group_that_others_have() -> None:
    whole = overlaid(SlidingWindowSpec(), FullAttentionSpec(), layers=3)
    stages = [replace(whole, kv_cache_tensors=list(whole.kv_cache_tensors)) for _ in range(2)]
    stages[0].kv_cache_groups = [whole.kv_cache_groups[0], replace_names(whole.kv_cache_groups[1], [])]
    stages[0].kv_cache_tensors = whole.kv_cache_tensors[:1]
    placed = [placement_of(each) for each in stages]
    layouts = [slab_layout(each, 2, placed) for each in stages]
    assert layouts[0] == layouts[1]
    assert [len(layouts[0].planes_of(group)) for group in range(2)] == [3, 2]


def replace_names(group: SimpleNamespace, names: list[str]) -> SimpleNamespace:
    """A group with other layers."""
    return SimpleNamespace(kv_cache_spec=group.kv_cache_spec, layer_names=names)


def test_the_host_has_latents_of_each_rank_of_a_pipeline() -> None:
    latents = layers_outermost()
    latents.kv_cache_groups = [SimpleNamespace(kv_cache_spec=FullAttentionSpec(max_tp_shards=1))]
    assert slab_layout(latents, 4, [placement_of(latents)] * 2).host_ranks(0) == 4


def test_stages_whose_slabs_would_differ_are_refused() -> None:
    rows = [blocks_outermost(layers=each) for each in (2, 3)]
    placed = [placement_of(each) for each in rows]
    with pytest.raises(ConnectorRefused, match="have 1024, 1536 bytes a block, which lie in a row: give all stages"):
        slab_layout(rows[0], 2, placed)
    equal = [placement_of(rows[1])] * 2
    assert slab_layout(rows[1], 2, equal).planes == slab_layout(rows[1]).planes
    wide, narrow = target_and_drafter(), layers_outermost(8, 512, 2)
    place_wider_first(wide)
    with pytest.raises(ConnectorRefused, match="as many layers for each stage of a pipeline"):
        slab_layout(narrow, 2, [placement_of(each) for each in (wide, narrow)])


def test_what_a_slab_cannot_have_is_refused() -> None:
    odd = layers_outermost(7, 100, 2)  # planes begin at multiples of 256 bytes
    with pytest.raises(ConnectorRefused, match="a multiple of 256"):
        slab_layout(odd)
    hosted = layers_outermost()
    hosted.kv_cache_tensors[0].host_resident = True
    with pytest.raises(ConnectorRefused, match="host memory"):
        slab_layout(hosted)
    with pytest.raises(ConnectorRefused, match="no KV cache"):
        slab_layout(KVCacheConfig(8, []))
