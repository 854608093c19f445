"""Conversations over real texts in the public domain: several share a long document and part after it.

gettysburg.txt is Abraham Lincoln's address of 1863 (the Bliss copy); declaration.txt is the opening of the
Declaration of Independence of the United States, 1776 (the engrossed copy).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

INSTRUCTION = "You answer questions about the text below, in one sentence, and say so when it holds no answer."

# (document's file, name of the conversation, what the user says turn by turn)
_SCRIPTS = (
    (
        "gettysburg",
        "dates",
        (
            "How many years before the speech was the nation founded?",
            "Which year was that, then?",
            "And which war was being fought when these words were spoken?",
        ),
    ),
    (
        "gettysburg",
        "ground",
        (
            "What have the people who are listening come to do?",
            "Why does the speaker say that they can not do it?",
            "Who has done it already?",
            "What is left for the living?",
        ),
    ),
    (
        "gettysburg",
        "ending",
        (
            'Quote the last sentence, from "government" on.',
            'How often does the word "dedicated" stand in the text?',
        ),
    ),
    (
        "declaration",
        "rights",
        (
            "Which rights does the text call unalienable?",
            "What are governments for?",
            "And when may the people put a new one in place?",
        ),
    ),
    (
        "declaration",
        "prudence",
        (
            "What does prudence dictate?",
            "Which king does the text complain of?",
        ),
    ),
)


@dataclass(frozen=True)
class Conversation:
    """Turns of a user about a document that stands at the head of every prompt."""

    name: str
    document: str
    turns: tuple[str, ...]


def conversations() -> tuple[Conversation, ...]:
    """All conversations; those on one document have the same `document`, to the byte, and differ after it."""
    folder = Path(__file__).parent
    return tuple(
        Conversation(
            name=f"{source}/{name}",
            document=f"{INSTRUCTION}\n\n{(folder / f'{source}.txt').read_text(encoding='utf-8')}",
            turns=turns,
        )
        for source, name, turns in _SCRIPTS
    )
