"""The prefix index: blocks as a list, and as a tree."""

from __future__ import annotations

from kvcache.v1 import admin_pb2

from cachesvc_ctl.core.command import at_least_one, flag, hex_digits
from cachesvc_ctl.core.text import table
from cachesvc_ctl.questions.models import model_flag, pick_model
from cachesvc_ctl.questions.question import DEADLINE_SECONDS, LIMIT, Admin, Question

ORDERS = {"recent": admin_pb2.BLOCK_ORDER_RECENT, "hits": admin_pb2.BLOCK_ORDER_HITS}


class Blocks(Question[admin_pb2.ListBlocksResponse]):
    """ListBlocks."""

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

    def ask(self, admin: Admin) -> admin_pb2.ListBlocksResponse:
        """Ask for one model's blocks; an empty answer while there is no model."""
        model = pick_model(admin, self.arguments.model)
        if model is None:
            return admin_pb2.ListBlocksResponse()
        request = admin_pb2.ListBlocksRequest(
            model_id=model.model_id,
            limit=self.arguments.limit,
            key_hex=self.arguments.key,
            order=ORDERS[self.arguments.order],
        )
        return admin.ListBlocks(request, timeout=DEADLINE_SECONDS)

    def show(self, answer: admin_pb2.ListBlocksResponse) -> str:
        """Show one block a line, with the page of each copy, and its state where it is not READY."""
        rows = [
            (
                b.key_hex[:16],
                b.parent_key_hex[:12] or "-",
                b.position,
                b.children,
                b.pins,
                b.hits,
                ", ".join(map(describe_copy, b.copies)),
            )
            for b in answer.blocks
        ]
        head = ("key", "parent", "position", "children", "pins", "hits", "copies (place/group page)")
        return table(head, rows) + (self.more("--limit") if answer.truncated else "")


def describe_copy(copy: admin_pb2.BlockCopy) -> str:
    """Place of a copy."""
    state = "" if copy.state == "READY" else f" {copy.state}"
    return f"{copy.place}/{copy.group} {copy.page}{state}"


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
        """Ask for one model's tree; an empty answer while there is no model."""
        model = pick_model(admin, self.arguments.model)
        if model is None:
            return admin_pb2.GetTreeResponse()
        request = admin_pb2.GetTreeRequest(
            model_id=model.model_id,
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
        """Show one node a line, indented."""
        nodes = answer.nodes[: self.arguments.limit]
        lines = [tree_line(n.depth, n.key_hex, n.position, n.tiers, n.children, n.descendants) for n in nodes]
        is_deep = any(n.depth + 1 >= self.arguments.depth and n.children for n in nodes)
        is_long = len(answer.nodes) > len(nodes) or (answer.truncated and not is_deep)
        held = held_back(is_deep=is_deep, is_long=is_long)
        return ("\n".join(lines) or "none") + (self.more(*held) if held else "")


def tree_line(depth: int, key_hex: str, position: int, places: str, children: int, below: int) -> str:
    """A node of a tree."""
    return f"{'  ' * depth}{key_hex[:16]}  block {position}, {places}, {children} children, {below:,} below"


def held_back(*, is_deep: bool, is_long: bool) -> list[str]:
    """Flags by which more of a tree could be seen: ``--depth`` held levels back, ``--limit`` lines."""
    return ["--depth"] * is_deep + ["--limit"] * is_long
