"""Greedy decoding over a model, with pages that come from outside as the sequence grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from examples.tiny_transformer.config import F32
from examples.tiny_transformer.model import Planes, Tables, TinyTransformer, WaitLayer, Work
from examples.tiny_transformer.tokens import BYTE_COUNT, Tokens

# Given a number of blocks and how many tokens are computed and verified: tables with a writable page in each group
# for each block from the first computed one up to that number. Called for the prompt, then each time decoding enters
# a block; a draft enters it a token early.
TablesFor = Callable[[int, int], Tables]


@dataclass(slots=True)
class Drafts:
    """Number of drafts that were proposed, and that the model accepted."""

    proposed: int = 0
    accepted: int = 0


def generate(
    model: TinyTransformer,
    prompt: Tokens,
    cached_tokens: int,
    new_tokens: int,
    tables_for: TablesFor,
    planes: Planes,
    wait_layer: WaitLayer,
    drafts: Drafts | None = None,
) -> Iterator[int]:
    """Yield new_tokens byte tokens, each as soon as computed; the first one ends the prefill.

    prompt: [n], of which the first cached_tokens < n are in the pages already. wait_layer is called in the
    prefill only. After k tokens the pages hold n + k - 1 positions: a token's own rows are computed when the
    next one is asked for. With a draft layer two tokens may come of one call. Raises ValueError when the cached
    tokens leave nothing to compute.
    """
    if not 0 <= cached_tokens < len(prompt):
        raise ValueError(f"{cached_tokens} cached tokens leave nothing to compute of a prompt of {len(prompt)}")
    count = Drafts() if drafts is None else drafts
    position, pending, wait = cached_tokens, prompt[cached_tokens:], wait_layer
    covered_blocks, left, draft = 0, new_tokens, False
    tables: Tables = {}
    while left:
        needed_blocks = -(-(position + len(pending) + draft) // model.config.block_tokens)
        if needed_blocks > covered_blocks:
            covered_blocks, tables = needed_blocks, tables_for(needed_blocks, position)
        work = Work(pending, position, tables)
        if draft:
            work = with_draft(work, model.guess([work], planes, wait)[0])
        picked = pick_tokens(work, model.compute([work], planes, wait)[0], count)
        yield from picked
        left -= len(picked)
        position = work.end_position - work.wanted + len(picked)
        pending, wait = np.array(picked[-1:], dtype=np.int32), _wait_for_nothing
        draft = model.config.draft is not None and left > 1


def with_draft(work: Work, logits: F32) -> Work:
    """A decode's work with the guessed token behind it, to be verified."""
    tokens = np.append(work.tokens, np.int32(pick_byte(logits[-1])))
    return Work(tokens, work.start_position, work.tables, wanted=2)


def pick_tokens(work: Work, logits: F32, drafts: Drafts) -> list[int]:
    """Next tokens of a work: one, or two where the model agrees with its draft."""
    picked = [pick_byte(logits[0])]
    if work.wanted == 2:
        drafts.proposed += 1
        if picked[0] == work.tokens[-1]:
            drafts.accepted += 1
            picked.append(pick_byte(logits[1]))
    return picked


def pick_byte(logits: F32) -> int:
    """The likeliest byte of logits [vocab]; specials are the prompt's template and never decoded."""
    return int(np.argmax(logits[:BYTE_COUNT]))


def _wait_for_nothing(layer: int) -> None:
    """All pages are in place once the prefill has run."""
