"""A dtype may be spelled as people, configurations and frameworks spell it."""

from __future__ import annotations

import numpy as np
import pytest
from cachesvc_client import gqa, gqa_windowed, mla
from cachesvc_client.layouts.families import dtype_name

from cachesvc.model.errors import LayoutRejected
from cachesvc.model.layout import ITEM_BYTES


class OfTorch:
    """A dtype as torch shows its own."""

    def __repr__(self) -> str:
        return "torch.bfloat16"


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("bf16", "bfloat16"),
        ("BF16", "bfloat16"),
        ("half", "float16"),
        ("fp32", "float32"),
        ("fp8", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        ("torch.bfloat16", "bfloat16"),
        (OfTorch(), "bfloat16"),
        (np.float16, "float16"),
        (np.dtype("int8"), "int8"),
        *((name, name) for name in ITEM_BYTES),
    ],
)
def test_every_spelling_has_the_layouts_name(spelled: object, name: str) -> None:
    assert dtype_name(spelled) == name


@pytest.mark.parametrize("spelled", ["int4", "", None, 16, np.float64, object(), "x" * 200])
def test_what_is_no_dtype_is_refused_with_those_that_are(spelled: object) -> None:
    with pytest.raises(LayoutRejected, match=r"unknown dtype .*known are .*bfloat16.*bf16"):
        dtype_name(spelled)


def test_torchs_own() -> None:
    torch = pytest.importorskip("torch", exc_type=ImportError)
    assert [dtype_name(kind) for kind in (torch.bfloat16, torch.half, torch.float8_e4m3fn, torch.uint8)] == [
        "bfloat16",
        "float16",
        "float8_e4m3fn",
        "uint8",
    ]


def test_families_take_every_spelling() -> None:
    size = {"kv_heads": 2, "head_dim": 8, "block_tokens": 4}
    assert gqa(layers=1, dtype="bf16", **size) == gqa(layers=1, dtype=OfTorch(), **size) == gqa(layers=1, **size)
    scaled = gqa(layers=1, dtype="int8", scale_dtype="fp32", **size)
    assert scaled == gqa(layers=1, dtype="int8", scale_dtype="float32", **size)
    latent = {"layers": 1, "kv_lora_rank": 8, "rope_dim": 8, "block_tokens": 4}
    assert mla(dtype="half", **latent) == mla(dtype="float16", **latent)
    with pytest.raises(LayoutRejected, match="unknown dtype 'int4'"):
        mla(dtype="int4", **latent)


def test_a_layer_knows_the_group_whose_table_it_goes_by() -> None:
    mixed = gqa_windowed(window_layers=[True, False, True], kv_heads=2, head_dim=8, block_tokens=4, window_tokens=9)
    assert [mixed.groups[mixed.group_of(layer)].name for layer in range(3)] == ["window", "full", "window"]
    windows = gqa_windowed(window_layers=[True], kv_heads=2, head_dim=8, block_tokens=4, window_tokens=9)
    assert windows.group_of(0) == 0
    with pytest.raises(LayoutRejected, match="layer 3 has planes in 0 groups"):
        mixed.group_of(3)
