"""Greedy decoding over a model, with pages that come from outside as the sequence grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from examples.tiny_transformer.config import F32
from examples.tiny_transformer.model import Planes, Tables, TinyTransformer, WaitLayer
from examples.tiny_transformer.tokens import BYTE_COUNT, Tokens

# Given a number of blocks: tables with a writable page in each group for each block from the first
# computed one up to that number. Called for the prompt, then each time decoding enters a block.
TablesFor = Callable[[int], Tables]


def generate(
    model: TinyTransformer,
    prompt: Tokens,
    cached_tokens: int,
    new_tokens: int,
    tables_for: TablesFor,
    planes: Planes,
    wait_layer: WaitLayer,
) -> Iterator[int]:
    """Yield new_tokens byte tokens, each as soon as it is known; the first one ends the prefill.

    prompt: [n], of which the first cached_tokens < n are in the pages already. wait_layer is called in the
    prefill only. After k tokens the pages hold n + k - 1 positions: a token's own rows are computed when the
    next one is asked for. Raises ValueError when the cached tokens leave nothing to compute.
    """
    if not 0 <= cached_tokens < len(prompt):
        raise ValueError(f"{cached_tokens} cached tokens leave nothing to compute of a prompt of {len(prompt)}")
    position, pending = cached_tokens, prompt[cached_tokens:]
    covered_blocks, wait = 0, wait_layer
    tables: Tables = {}
    for _ in range(new_tokens):
        needed_blocks = -(-(position + len(pending)) // model.config.block_tokens)
        if needed_blocks > covered_blocks:
            covered_blocks, tables = needed_blocks, tables_for(needed_blocks)
        logits = model.forward(pending, position, tables, planes, wait)
        token = pick_byte(logits)
        yield token
        position += len(pending)
        pending, wait = np.array([token], dtype=np.int32), _wait_for_nothing


def pick_byte(logits: F32) -> int:
    """The likeliest byte of logits [vocab]; specials are the prompt's template and never decoded."""
    return int(np.argmax(logits[:BYTE_COUNT]))


def _wait_for_nothing(layer: int) -> None:
    """All pages are in place once the prefill has run."""
