"""The prefix index: blocks as a list, and as a tree."""

from __future__ import annotations

import argparse
import re

from kvcache.v1 import admin_pb2, common_pb2, inspect_pb2

from cachesvc_ctl.core.command import (
    DEADLINE_SECONDS,
    LIMIT,
    Admin,
    Listing,
    Question,
    Table,
    at_least_one,
    count,
    flag,
    hex_digits,
    table,
)
from cachesvc_ctl.status import model_flag, model_number, only_number

ORDERS = {"recent": admin_pb2.BLOCK_ORDER_RECENT, "hits": admin_pb2.BLOCK_ORDER_HITS}


class Blocks(Listing[admin_pb2.ListBlocksResponse]):
    """One block a line, with the page of each copy, and its state where it is not READY."""

    name = "blocks"
    about = "resident blocks, most recently used or most often hit first"
    flags = (
        model_flag(),
        flag("--order", choices=tuple(ORDERS), default="recent", help="default recent"),
        flag(
            "--key", type=hex_digits, action="append", default=[], metavar="HEX", help="only this; its first digits do"
        ),
        LIMIT,
    )
    lines = "blocks"
    table = Table(
        "key={key_hex:.16} | parent={parent_key_hex:.12}? | position | children | pins | hits | "
        "copies (place/group page)=copies",
        copies=lambda block: ", ".join(map(describe_copy, block.copies)),
    )

    def ask(self, admin: Admin) -> admin_pb2.ListBlocksResponse:
        request = admin_pb2.ListBlocksRequest(
            model_id=only_number(admin, self.arguments.model),
            limit=self.arguments.limit,
            key_hex=self.arguments.key,
            order=ORDERS[self.arguments.order],
        )
        return admin.ListBlocks(request, timeout=DEADLINE_SECONDS)


def describe_copy(copy: admin_pb2.BlockCopy) -> str:
    return f"{copy.place}/{copy.group} {copy.page}" + ("" if copy.state == "READY" else f" {copy.state}")


class Tree(Question[admin_pb2.GetTreeResponse]):
    """GetTree, asked for one node more than ``--limit``, which tells which bound held something back."""

    name = "tree"
    about = "the prefix index as a tree, the biggest branches first"
    flags = (
        model_flag(),
        flag("--key", type=hex_digits, metavar="HEX", help="start at this block; its first digits do"),
        flag("--depth", type=at_least_one, default=6, metavar="N", help="levels at most (default 6)"),
        LIMIT,
    )

    def ask(self, admin: Admin) -> admin_pb2.GetTreeResponse:
        request = admin_pb2.GetTreeRequest(
            model_id=only_number(admin, self.arguments.model),
            key_hex=self.arguments.key or "",
            depth=self.arguments.depth,
            limit=self.arguments.limit + 1,
        )
        return admin.GetTree(request, timeout=DEADLINE_SECONDS)

    def data(self, answer: admin_pb2.GetTreeResponse) -> admin_pb2.GetTreeResponse:
        """The nodes that were wanted, and whether there are more."""
        nodes = answer.nodes[: self.arguments.limit]
        truncated = answer.truncated or len(answer.nodes) > len(nodes)
        return admin_pb2.GetTreeResponse(nodes=nodes, truncated=truncated)

    def show(self, answer: admin_pb2.GetTreeResponse) -> str:
        nodes = answer.nodes[: self.arguments.limit]
        lines = [tree_line(n.depth, n.key_hex, n.position, n.tiers, n.children, n.descendants) for n in nodes]
        is_deep = any(n.depth + 1 >= self.arguments.depth and n.children for n in nodes)
        is_long = len(answer.nodes) > len(nodes) or (answer.truncated and not is_deep)
        held = held_back(is_deep=is_deep, is_long=is_long)
        return ("\n".join(lines) or "none") + (self.more(*held) if held else "")


def tree_line(depth: int, key_hex: str, position: int, places: str, children: int, below: int) -> str:
    return f"{'  ' * depth}{key_hex[:16]}  block {position}, {places}, {children} children, {below:,} below"


def held_back(*, is_deep: bool, is_long: bool) -> list[str]:
    """Flags by which more of a tree could be seen: ``--depth`` held levels back, ``--limit`` lines."""
    return ["--depth"] * is_deep + ["--limit"] * is_long


def _prefix(text: str) -> str:
    digits = text.lower().removeprefix("0x")
    if not re.fullmatch("[0-9a-f]{4,64}", digits):
        raise argparse.ArgumentTypeError(f"{text!r} is not 4 to 64 hexadecimal digits of a key; see cachesvc blocks")
    return digits


class Why(Question[admin_pb2.ExplainResponse]):
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
            COPIES.text(block.copies),
        ]
    if story.tickets:
        lines.append("moved by ticket " + ", ".join(map(str, story.tickets)))
    if story.holders:
        lines += ["", HOLDERS.text(story.holders)]
        if story.holders_truncated:
            lines.append("(and more)")
    if story.events:
        lines += ["", EVENTS.text(story.events)]
    return "\n".join(lines)


COPIES = Table("place | group | state | page")
HOLDERS = Table(
    "engine | lease={lease_id:.12} | sequence | pins it on=on | how",
    sequence=lambda holder: "prefetch" if holder.sequence_id < 0 else str(holder.sequence_id),
    on=lambda holder: holder.tier if holder.tier == "host" else f"replica {holder.replica}",
    how=lambda holder: f"through {holder.blocks_below} blocks below" if holder.blocks_below else "directly",
)
EVENTS = Table(
    "when={age_seconds:.1f} s ago | change=sequence_number | what=kind | =present | place | group | why=reason",
    present=lambda event: "at" if event.present else "gone from",
)


class Leases(Listing[admin_pb2.ListLeasesResponse]):
    name = "leases"
    about = "which engine holds what"
    lines = "leases"
    table = Table(
        "lease={lease_id:.12} | engine | model=model_id | replica | state | silent s={silent_seconds:.1f} | "
        "sequences | private=private_pages | pinned=pinned_blocks | processes=process_ids"
    )

    def ask(self, admin: Admin) -> admin_pb2.ListLeasesResponse:
        return admin.ListLeases(admin_pb2.ListLeasesRequest(), timeout=DEADLINE_SECONDS)


class Tenants(Question[inspect_pb2.ListTenantsResponse]):
    name = "tenants"
    about = "what each tenant holds and may hold"

    def ask(self, admin: Admin) -> inspect_pb2.ListTenantsResponse:
        return admin.ListTenants(inspect_pb2.ListTenantsRequest(), timeout=DEADLINE_SECONDS)

    def show(self, answer: inspect_pb2.ListTenantsResponse) -> str:
        """Show a line for each thing that is counted."""
        rows = [
            (t.tenant or "(shared)", what, t.used.get(what, 0), t.limits.get(what, 0) or "-")
            for t in answer.tenants
            for what in sorted({*t.used, *t.limits})
        ]
        return table(("tenant", "of what", "used", "limit"), rows)


class Sequences(Listing[admin_pb2.ListSequencesResponse]):
    name = "sequences"
    about = "open sequences"
    flags = (LIMIT,)
    lines = "sequences"
    table = Table(
        "lease={lease_id:.12} | sequence=sequence_id | blocks | sealed=sealed_blocks | private pages=private_pages | "
        "where | failed?",
        where=lambda sequence: "out" if sequence.swapped_out else "device",
    )

    def ask(self, admin: Admin) -> admin_pb2.ListSequencesResponse:
        return admin.ListSequences(admin_pb2.ListSequencesRequest(limit=self.arguments.limit), timeout=DEADLINE_SECONDS)


def ticket_state(ticket: common_pb2.Ticket) -> str:
    """State of a ticket in a word."""
    return common_pb2.TicketState.Name(ticket.state).removeprefix("TICKET_STATE_").lower()


class Tickets(Listing[admin_pb2.ListTicketsResponse]):
    name = "tickets"
    about = "transfers, the newest first"
    flags = (LIMIT,)
    lines = "tickets"
    table = Table("ticket=id | direction | state | blocks | bytes=size_bytes | reason?", state=ticket_state)

    def ask(self, admin: Admin) -> admin_pb2.ListTicketsResponse:
        return admin.ListTickets(admin_pb2.ListTicketsRequest(limit=self.arguments.limit), timeout=DEADLINE_SECONDS)
