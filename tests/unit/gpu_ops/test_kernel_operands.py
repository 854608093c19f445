"""Operands that do not fit are refused by name before a launch: no GPU is needed to say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gpu_ops.kernels import batches, index_keys, latents, packed_keys, page_copies
from gpu_ops.kernels.batches import BlockTable, Reach
from gpu_ops.kernels.decode_attention import HeadRules, PagedCache, SplitSpace, decode_attention, plan_splits
from gpu_ops.kernels.launch import compile_source, kernel_files, whole_source
from gpu_ops.kernels.operands import Half, Kind, bytes_operand, operand

STREAM = 0


class OnDevice:
    """An array that a device would hold: what frameworks show of one."""

    dtype: str | None = None

    def __init__(self, array: npt.NDArray[Any], typestr: str | None = None) -> None:
        start = -array.ctypes.data % 16  # as a device's allocator, from a multiple of 16 on
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "strides": None if array.flags.c_contiguous else array.strides,
            "typestr": typestr or array.dtype.str,
            "data": (array.ctypes.data + start, False),
            "version": 3,
        }


def on_device(shape: tuple[int, ...], kind: Any = np.int32) -> OnDevice:
    return OnDevice(np.zeros(shape, kind))


def test_an_array_is_read_with_its_strides_and_raw_types() -> None:
    array = np.zeros((6, 4, 8), np.uint16)
    read = operand("x", OnDevice(array[::2, :, :4]), Kind.BF16, (3, None, 4))
    assert (read.shape, read.strides, read.count) == ((3, 4, 4), (128, 16, 2), 48)
    assert operand("x", OnDevice(array, "<V2"), Kind.BF16, (6, 4, 8)).strides == (64, 16, 2)  # as torch says bf16
    mistaken = OnDevice(array, "<f2")
    mistaken.dtype = "torch.bfloat16"
    assert operand("x", mistaken, Kind.BF16, (6, 4, 8)).count == array.size
    with pytest.raises(ValueError, match="not fp16"):
        operand("x", mistaken, Kind.FP16, (6, 4, 8))
    assert read.dense(2) is read.spaced().spaced(1) is read.aligned(2)
    with pytest.raises(ValueError, match=r"x: strides .* no gaps from axis 1 on"):
        read.dense(1)
    with pytest.raises(ValueError, match="x: float is no array on a device"):
        bytes_operand("x", 1.0)  # type: ignore[arg-type]
    for wrong, kind, why in (
        (on_device((2, 3)), Kind.INT64, "x: dtype int32, not int64"),
        (on_device((2, 3), np.uint32), Kind.INT32, "x: dtype uint32, not int32"),
        (on_device((2, 3), np.float16), Kind.BF16, "x: dtype float16, not bf16"),
        (on_device((2, 4)), Kind.INT32, r"x: shape \(2, 4\), not \(any, 3\)"),
        (on_device((3,)), Kind.INT32, r"x: shape \(3,\), not \(any, 3\)"),
    ):
        with pytest.raises(ValueError, match=why):
            operand("x", wrong, kind, (None, 3))


def packed(pool: OnDevice, slots: OnDevice | None = None, latent: OnDevice | None = None) -> Callable[[], None]:
    keys = latent or on_device((4, 512), np.uint16)
    where = slots or on_device((4,), np.int64)
    rope = on_device((4, 64), np.uint16)
    return lambda: packed_keys.write_packed_keys(pool, where, keys, rope, STREAM, Half.BF16)


def attention(**changed: Any) -> Callable[[], None]:
    """A launch that would do, but for what is changed."""
    given: dict[str, Any] = {
        "queries": on_device((2, 8, 64), np.uint16),
        "keys": on_device((5, 2, 16, 64), np.uint16),
        "values": on_device((5, 2, 16, 64), np.uint16),
        "cells": on_device((2, 3)),
        "lengths": on_device((2,)),
        "out": on_device((2, 8, 64), np.uint16),
        "space": SplitSpace(1, None, None),
        "scale": 1.0,
    } | changed
    one = operand("rule", on_device((2,)), Kind.INT32, (2,))
    cache = PagedCache(given["keys"], given["values"], given["cells"], given["lengths"])
    rules = HeadRules(2, 1, 0, one, one, one)
    return lambda: decode_attention(
        given["queries"], cache, rules, given["space"], given["out"], STREAM, given["scale"]
    )


REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "packed pool": (packed(on_device((3, 1, 16, 655), np.uint8)), r"pool: shape .* 655\), not"),
    "packed type": (packed(on_device((3, 1, 16, 656), np.uint16)), "pool: dtype uint16, not a byte"),
    "packed latent": (packed(on_device((1, 1, 1, 656)), latent=on_device((4, 496), np.uint16)), "latent: 496 values"),
    "packed slots": (packed(on_device((1, 1, 1, 656)), slots=on_device((4,))), "slots: dtype int32, not int64"),
    "index page": (lambda: _ignored(index_keys.whole_pages(on_device((3, 15, 132), np.uint8))), "not multiples of 16"),
    "index planes": (
        lambda: _ignored(index_keys.apart(on_device((3, 4, 128), np.uint8), on_device((3, 5), np.float32))),
        r"scales: shape \(3, 5\), not \(3, 4\)",
    ),
    "window": (
        lambda: batches.window_rows_paged(
            on_device((3,)),
            on_device((2,)),
            BlockTable(on_device((2, 4)), 9, 16),
            Reach(64, 1),
            on_device((5, 1, 64)),
            0,
        ),
        "rows_out: width 64 for 65 rows",
    ),
    "pool of too many rows": (
        lambda: batches.token_slots(
            on_device((3,)), on_device((2,)), BlockTable(on_device((2, 4)), 1 << 25, 64), on_device((5,), np.int64), 0
        ),
        "not numbered in int32",
    ),
    "group": (
        lambda: batches.expand_tables([on_device((1, 2))], [0, 1], on_device((2, 2)), 0),
        r"group_of_head: \[1\]",
    ),
    "group's width": (
        lambda: batches.expand_tables([on_device((1, 3))], [0, 0], on_device((2, 2)), 0),
        r"tables\[0\]: 3 blocks, out 2",
    ),
    "window without lengths": (
        lambda: latents.gather_latents(
            on_device((3, 1, 16, 576), np.uint16),
            latents.NewLatents(on_device((4, 512), np.uint16), on_device((4, 64), np.uint16)),
            latents.Gathering(on_device((1, 2)), on_device((2,)), on_device((2,)), None, Reach(8)),
            on_device((9, 512), np.uint16),
            on_device((9, 64), np.uint16),
            STREAM,
        ),
        "cached: needed for a window",
    ),
    "targets": (lambda: _ignored(page_copies.page_pairs([1, 2], [3, 1], 0)), r"targets: \[1\] are sources too"),
    "target twice": (lambda: _ignored(page_copies.page_pairs([1, 2], [3, 3], 0)), "targets: one is named twice"),
    "width": (attention(queries=on_device((2, 8, 96), np.uint16)), "queries: D 96"),
    "heads": (attention(queries=on_device((2, 7, 64), np.uint16)), "queries: 7 heads for 2 kv heads"),
    "block": (
        attention(keys=on_device((5, 2, 24, 64), np.uint16), values=on_device((5, 2, 24, 64), np.uint16)),
        "keys: blocks of 24 tokens, not a multiple of 16",
    ),
    "values": (attention(values=on_device((4, 2, 16, 64), np.uint16)), "values: shape"),
    "table": (attention(cells=on_device((4, 3))), r"table: shape \(4, 3\), not \(2, any\)"),
    "lengths": (attention(lengths=on_device((2,), np.int64)), "lengths: dtype int64"),
    "half": (attention(queries=on_device((2, 8, 64), np.float16)), "queries: dtype float16, not bf16"),
    "scale": (attention(scale=0.0), "scale: 0"),
}


def _ignored(_: object) -> None:
    """Ignore a result."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    call, why = REFUSED[name]
    with pytest.raises(ValueError, match=why):
        call()


def test_splits_fill_the_machine_but_are_no_smaller_than_useful() -> None:
    assert plan_splits(1, 8, 4, 128, 132) == 1
    assert plan_splits(1, 8, 4, 1 << 20, 132) == 132
    assert plan_splits(64, 8, 4, 1 << 20, 132) == 3
    assert plan_splits(64, 8, 32, 1 << 20, 132) == 2
    assert plan_splits(512, 8, 4, 1 << 20, 132) == 1


def test_a_source_with_its_headers_in_place_compiles() -> None:
    """Compile like CuPy does: without a folder to look for headers."""
    for path in kernel_files():
        text = whole_source(path.stem)
        assert '#include "' not in text
        assert compile_source(text, path.name, "sm_90")
