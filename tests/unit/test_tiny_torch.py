"""The tiny transformer on torch: the same tokens as on NumPy, and its own bits however a prompt is cut."""

from __future__ import annotations

import numpy as np
import pytest

from examples.tiny_transformer.arrays import torch_arrays
from examples.tiny_transformer.digest import digest_model
from examples.tiny_transformer.generate import generate
from examples.tiny_transformer.model import build_model, make_planes
from tests.unit.tiny_rig import make_prompt, wait_for_nothing, with_blocks

pytest.importorskip("torch", reason="torch is not installed")

FLOAT_VARIANTS = ("gqa", "mla", "window", "sinks", "mla-window", "head-wise", "mtp")
"""Those whose rows are float32; fp8 rows are made by NumPy alone."""


@pytest.mark.parametrize("name", FLOAT_VARIANTS)
def test_torch_gives_numpys_tokens(name: str) -> None:
    config, prompt = with_blocks(name, 16), make_prompt(43)
    tables = {group.name: np.arange(8, dtype=np.int32) for group in config.groups}
    answers = []
    for model in (build_model(config), build_model(config, torch_arrays("cpu"))):
        planes = make_planes(model, 8)
        answers.append(list(generate(model, prompt, 0, 30, lambda *_: tables, planes, wait_for_nothing)))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", FLOAT_VARIANTS)
def test_torch_gives_its_own_logits_in_chunks_too(name: str) -> None:
    model, prompt = build_model(with_blocks(name, 16), torch_arrays("cpu")), make_prompt(61)
    tables = {group.name: np.arange(8, dtype=np.int32) for group in model.config.groups}
    expected = model.forward(prompt, 0, tables, make_planes(model, 8), wait_for_nothing)
    planes, logits = make_planes(model, 8), expected[:0]
    for start in range(0, 61, 5):
        logits = model.forward(prompt[start : start + 5], start, tables, planes, wait_for_nothing)
    np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=1e-5)
    assert int(np.argmax(logits)) == int(np.argmax(expected))


def test_another_module_is_another_namespace() -> None:
    config = with_blocks("gqa", 16)
    assert digest_model(build_model(config)) != digest_model(build_model(config, torch_arrays("cpu")))
