"""Text to tokens and back: one token a byte, and a few specials that frame the turns of a conversation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

BYTE_COUNT = 256
PAD, BEGIN, USER, ASSISTANT, END = range(BYTE_COUNT, BYTE_COUNT + 5)
VOCAB_SIZE = BYTE_COUNT + 5


def encode(text: str) -> list[int]:
    """The UTF-8 bytes of a text, as tokens."""
    return list(text.encode("utf-8"))


def decode(tokens: Sequence[int]) -> str:
    """The text of the byte tokens; specials are left out and broken UTF-8 is shown as U+FFFD."""
    return bytes(token for token in tokens if token < BYTE_COUNT).decode("utf-8", errors="replace")


def chat_prompt(document: str, turns: Sequence[str], answers: Sequence[Sequence[int]]) -> Tokens:
    """The prompt of the last turn: document, then each turn with its answer; the last one is unanswered.

    Each prompt begins with the prompt of the turn before and that turn's answer, token by token, so what was
    cached of the conversation stays a prefix. Raises ValueError unless there is one answer fewer than turns.
    """
    if len(answers) != len(turns) - 1:
        raise ValueError(f"{len(turns)} turns need {len(turns) - 1} answers, not {len(answers)}")
    prompt = [BEGIN, *encode(document)]
    for index, turn in enumerate(turns):
        prompt += [USER, *encode(turn), ASSISTANT]
        if index < len(answers):
            prompt += [*answers[index], END]
    return np.array(prompt, dtype=np.int32)
