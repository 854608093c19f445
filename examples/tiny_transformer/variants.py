"""Models as data: one of each family. The demo's are sized so that a cold prefill is felt and a hit shows."""

from __future__ import annotations

from examples.tiny_transformer.config import Draft, Group, TinyConfig, alike, head_wise
from examples.tiny_transformer.families import Gqa, Mla
from examples.tiny_transformer.packed import Dsa, PackedMla, ScaledGqa

FULL = Group("full")
WINDOW = Group("window", window_tokens=128, sink_tokens=4)
LATENT = Group("full", is_replicated=True)
LATENT_WINDOW = Group("window", window_tokens=128, is_replicated=True)

WIDE_GQA = Gqa(heads=8, kv_heads=2, head_dim=64)
WIDE_MLA = Mla(heads=8, kv_lora_rank=128, rope_dim=32, nope_dim=64, value_dim=64)
SIZES_656 = {"heads": 4, "kv_lora_rank": 512, "rope_dim": 64, "nope_dim": 32, "value_dim": 32}  # rows of 656 bytes

GQA = TinyConfig(name="tiny-gqa", groups=(FULL,), layers=alike(WIDE_GQA, ("full",) * 8))

SCALED_GQA = TinyConfig(
    name="tiny-gqa-fp8",
    groups=(FULL,),
    layers=alike(ScaledGqa(heads=8, kv_heads=2, head_dim=64), ("full",) * 4),
    d_model=256,
    ff_dim=512,
)

MLA = TinyConfig(name="tiny-mla", groups=(LATENT,), layers=alike(WIDE_MLA, ("full",) * 8))

WINDOWED_GQA = TinyConfig(name="tiny-window", groups=(FULL, WINDOW), layers=alike(WIDE_GQA, ("window", "full") * 4))

DSA = TinyConfig(
    name="tiny-dsa",
    groups=(LATENT,),
    layers=alike(Dsa(**SIZES_656, index_heads=2, index_dim=128, top_k=64), ("full",) * 3),
    d_model=256,
    ff_dim=512,
)

MLA_SWA = TinyConfig(
    name="tiny-mla-swa",
    groups=(LATENT, LATENT_WINDOW),
    layers=alike(PackedMla(**SIZES_656), ("window", "window")) + alike(Mla(**SIZES_656), ("full",)),
    d_model=256,
    ff_dim=512,
)

HEAD_WISE = TinyConfig(
    name="tiny-head-wise",
    groups=(FULL, WINDOW),
    layers=head_wise(
        Gqa(heads=8, kv_heads=4, head_dim=32),
        ((False, True, True, False), (True, True, True, True), (True, False, True, True)),
        full="full",
        window="window",
    ),
    d_model=256,
    ff_dim=512,
)

MTP = TinyConfig(
    name="tiny-mtp",
    groups=(FULL, Group("draft"), Group("draft-hidden", window_tokens=2)),
    layers=alike(Gqa(heads=4, kv_heads=2, head_dim=32), ("full",) * 3),
    draft=Draft(alike(Gqa(heads=4, kv_heads=2, head_dim=32), ("draft",))[0], "draft-hidden"),
    d_model=256,
    ff_dim=512,
    residual_scale=0.4,
)

DEMO = {config.name: config for config in (GQA, MLA, WINDOWED_GQA)}
VARIANTS = {**DEMO, **{config.name: config for config in (SCALED_GQA, DSA, MLA_SWA, HEAD_WISE, MTP)}}
