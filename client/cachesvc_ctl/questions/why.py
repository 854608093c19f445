"""``cachesvc why KEY``: a block's copies, its holders, and its history."""

from __future__ import annotations

import argparse
import re

from kvcache.v1 import admin_pb2, inspect_pb2

from cachesvc_ctl.core.command import count, flag
from cachesvc_ctl.core.text import table
from cachesvc_ctl.questions.models import model_flag, model_number
from cachesvc_ctl.questions.question import DEADLINE_SECONDS, Admin, Question


def _prefix(text: str) -> str:
    digits = text.lower().removeprefix("0x")
    if not re.fullmatch("[0-9a-f]{4,64}", digits):
        raise argparse.ArgumentTypeError(f"{text!r} is not 4 to 64 hexadecimal digits of a key; see cachesvc blocks")
    return digits


class Why(Question[admin_pb2.ExplainResponse]):
    """Explain."""

    name = "why"
    about = "where a block is, who pins it, and why it came or went"
    epilog = "Keys are shown by blocks and tree."
    flags = (
        flag(
            "key", type=_prefix, metavar="KEY", help="a block's key in hexadecimal, or how it begins (4 digits or more)"
        ),
        model_flag("every model"),
        flag("--events", type=count, default=16, metavar="N", help="of each block, the newest first (default 16)"),
    )

    def ask(self, admin: Admin) -> admin_pb2.ExplainResponse:
        """The blocks whose keys begin so; bytes are asked for, so a last odd digit is compared here."""
        digits: str = self.arguments.key
        request = inspect_pb2.ExplainRequest(
            model_id=model_number(admin, self.arguments.model),
            key_prefix=bytes.fromhex(digits[: len(digits) // 2 * 2]),
            events=self.arguments.events,
        )
        answer = admin.Explain(request, timeout=DEADLINE_SECONDS)
        fitting = [story for story in answer.stories if story.key.hex().startswith(digits)]
        del answer.stories[:]
        answer.stories.extend(fitting)
        return answer

    def show(self, answer: admin_pb2.ExplainResponse) -> str:
        """Show a paragraph and tables for each block."""
        return describe(answer, self.arguments.key)

    def code(self, answer: admin_pb2.ExplainResponse) -> int:
        """1 where no block, past or present, begins so."""
        return int(not answer.stories)


def describe(answer: admin_pb2.ExplainResponse, digits: str) -> str:
    """The answer for people."""
    reach = (
        f"changes are known for the last {answer.forgotten_before_seconds:.0f} s"
        if answer.forgotten_before_seconds
        else "every change since the daemon started is known"
    )
    if not answer.stories:
        return f"no block that begins with {digits} is here, and no change that is known was about one; {reach}"
    text = "\n\n".join(_story(story) for story in answer.stories)
    more = "\n(more blocks begin so; give more digits)" if answer.truncated else ""
    return f"{text}\n\n{reach}{more}"


def _story(story: admin_pb2.BlockStory) -> str:
    lines = [f"{story.key.hex()}  model {story.model_id} ({story.model})", story.verdict]
    if story.HasField("block"):
        block = story.block
        parent = block.parent_key.hex()[:16] or "the root"
        lines += [
            f"block {block.position} below {parent}, {block.children} children",
            f"{block.hits} accesses ended at it (its publish is one), {story.accesses_since} of others since the last",
            "",
            table(("place", "group", "state", "page"), [(c.place, c.group, c.state, c.page) for c in block.copies]),
        ]
    if story.tickets:
        lines.append("moved by ticket " + ", ".join(map(str, story.tickets)))
    if story.holders:
        rows = [
            (
                h.engine,
                h.lease_id[:12],
                "prefetch" if h.sequence_id < 0 else str(h.sequence_id),
                h.tier if h.tier == "host" else f"replica {h.replica}",
                "directly" if not h.blocks_below else f"through {h.blocks_below} blocks below",
            )
            for h in story.holders
        ]
        lines += ["", table(("engine", "lease", "sequence", "pins it on", "how"), rows)]
        if story.holders_truncated:
            lines.append("(and more)")
    if story.events:
        rows_of_events = [
            (
                f"{e.age_seconds:.1f} s ago",
                e.sequence_number,
                e.kind,
                "at" if e.present else "gone from",
                e.place,
                e.group,
                e.reason,
            )
            for e in story.events
        ]
        head = ("when", "change", "what", "", "place", "group", "why")
        lines += ["", table(head, rows_of_events)]
    return "\n".join(lines)
