"""The demo's models: one of each family, sized so that a cold prefill is felt and a hit shows."""

from __future__ import annotations

from examples.tiny_transformer.config import Group, TinyConfig
from examples.tiny_transformer.families import Gqa, Mla

FULL = Group("full")
WINDOW = Group("window", window_tokens=128, sink_tokens=4)

GQA = TinyConfig(
    name="tiny-gqa",
    attention=Gqa(heads=8, kv_heads=2, head_dim=64),
    groups=(FULL,),
    layer_groups=("full",) * 8,
)

MLA = TinyConfig(
    name="tiny-mla",
    attention=Mla(heads=8, kv_lora_rank=128, rope_dim=32, nope_dim=64, value_dim=64),
    groups=(FULL,),
    layer_groups=("full",) * 8,
)

WINDOWED_GQA = TinyConfig(
    name="tiny-window",
    attention=Gqa(heads=8, kv_heads=2, head_dim=64),
    groups=(FULL, WINDOW),
    layer_groups=("window", "full") * 4,
)

VARIANTS = {config.name: config for config in (GQA, MLA, WINDOWED_GQA)}
