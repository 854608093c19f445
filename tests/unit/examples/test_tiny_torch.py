"""The transformer in torch, on the processor: NumPy's tokens in every family, and its own bits however it is cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from examples.tiny_transformer.arrays import NUMPY, Arrays, torch_arrays
from examples.tiny_transformer.digest import digest_model
from examples.tiny_transformer.generate import generate, pick_byte
from examples.tiny_transformer.model import Work, build_model, make_planes
from examples.tiny_transformer.packing import pack_index_key, pack_latent, scale_fp8, unpack_latent
from tests.unit.examples.tiny_rig import PACKED, SMALL, make_prompt, wait_for_nothing, with_blocks

pytest.importorskip("torch", reason="torch is not installed")

CPU = "cpu"


def awkward_rows(rows: int, width: int) -> npt.NDArray[np.float32]:
    """Rows of all sizes: some of zeros, some beside the least normal number, some whose codes are halves of steps."""
    draw = np.random.default_rng(11)
    values = draw.standard_normal((rows, width)) * 10.0 ** draw.integers(-40, 30, (rows, 1))
    values[::7] = 0
    values[1::7] = np.rint(values[1::7] / np.abs(values[1::7]).max(axis=1, keepdims=True) * 448)
    return values.astype(np.float32)


@pytest.mark.parametrize("name", SMALL)
def test_torch_gives_numpys_tokens(name: str) -> None:
    config, prompt = with_blocks(name, 16), make_prompt(43)
    tables = {group.name: np.arange(8, dtype=np.int32) for group in config.groups}
    answers = []
    for model in (build_model(config), build_model(config, torch_arrays(CPU))):
        planes = make_planes(model, 8)
        answers.append(list(generate(model, prompt, 0, 30, lambda *_: tables, planes, wait_for_nothing)))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", SMALL)
def test_torch_logits_are_numpys_within_a_tolerance(name: str) -> None:
    """fp8 rows may fall to the other side of a rounding border, when the modules' sums differ in the last bit."""
    config, prompt = with_blocks(name, 16), make_prompt(61)
    tables = {group.name: np.arange(8, dtype=np.int32) for group in config.groups}
    numpys, torchs = (
        model.forward(prompt, 0, tables, make_planes(model, 8), wait_for_nothing)
        for model in (build_model(config), build_model(config, torch_arrays(CPU)))
    )
    tolerance = 2e-2 if name in PACKED else 1e-4
    np.testing.assert_allclose(torchs, numpys, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("cut", [1, 5, 16, 23])
def test_torch_gives_its_own_bits_in_chunks_too(name: str, cut: int) -> None:
    model, prompt = build_model(with_blocks(name, 16), torch_arrays(CPU)), make_prompt(61)
    tables = {group.name: np.arange(8, dtype=np.int32) for group in model.config.groups}
    whole = make_planes(model, 8)
    expected = model.forward(prompt, 0, tables, whole, wait_for_nothing)
    planes, logits = make_planes(model, 8), expected[:0]
    for start in range(0, 61, cut):
        logits = model.forward(prompt[start : start + cut], start, tables, planes, wait_for_nothing)
    np.testing.assert_array_equal(logits, expected)
    for key, pages in planes.items():
        np.testing.assert_array_equal(as_bytes(pages.numpy()), as_bytes(whole[key].numpy()))


@pytest.mark.parametrize("name", SMALL)
def test_chunks_side_by_side_give_the_same_tokens(name: str) -> None:
    """Lanes, full and empty ones, as a GPU has them; three requests at once, whose prefills are cut."""
    config = with_blocks(name, 16)
    lanes = replace(torch_arrays(CPU), lanes=3, step_blocks=4)
    plain, model = build_model(config, torch_arrays(CPU)), build_model(config, lanes)
    prompts = [make_prompt(length, seed=length) for length in (61, 17, 40)]
    planes = make_planes(model, 24)
    tables = [{group.name: np.arange(at, at + 8, dtype=np.int32) for group in config.groups} for at in (0, 8, 16)]
    tokens: list[list[int]] = [[] for _ in prompts]
    starts = [0] * len(prompts)
    for _ in range(14):
        known = [np.append(prompt, np.array(new, np.int32)) for prompt, new in zip(prompts, tokens, strict=True)]
        works = [
            Work(all_tokens[start : start + 23].astype(np.int32), start, table)
            for all_tokens, start, table in zip(known, starts, tables, strict=True)
        ]
        for at, logits in enumerate(model.compute(works, planes, wait_for_nothing)):
            starts[at] = works[at].end_position
            if starts[at] == len(known[at]):
                tokens[at].append(pick_byte(logits[-1]))
    for prompt, new in zip(prompts, tokens, strict=True):
        own, table = make_planes(plain, 8), {group.name: np.arange(8, dtype=np.int32) for group in config.groups}
        stream = generate(plain, prompt, 0, 14, lambda *_, t=table: t, own, wait_for_nothing)
        assert len(new) > 10
        assert new == list(stream)[: len(new)]


def test_another_module_is_another_namespace() -> None:
    config = with_blocks("gqa", 16)
    assert digest_model(build_model(config)) != digest_model(build_model(config, torch_arrays(CPU)))


def test_rows_of_bytes_are_numpys_to_the_byte() -> None:
    arrays = torch_arrays(CPU)
    latent, rope_key = awkward_rows(70, 512), awkward_rows(70, 64)
    rows = pack_latent(NUMPY, latent, rope_key)
    np.testing.assert_array_equal(arrays.get(pack_latent(arrays, arrays.put(latent), arrays.put(rope_key))), rows)
    assert_same(arrays, unpack_latent(arrays, arrays.put(rows), 512), unpack_latent(NUMPY, rows, 512))
    for pack in (scale_fp8, pack_index_key):
        for got, expected in zip(pack(arrays, arrays.put(latent)), pack(NUMPY, latent), strict=True):
            assert_same(arrays, got, expected)


def assert_same(arrays: Arrays, got: Any, expected: npt.NDArray[Any]) -> None:
    np.testing.assert_array_equal(as_bytes(arrays.get(got)), as_bytes(expected))


def as_bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).view(np.uint8)
