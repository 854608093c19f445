"""``cachesvc dump`` writes a model's index, or its last requests, to a file; ``cachesvc load`` studies an index."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from cachesvc_client.core.errors import InvalidRequest
from cachesvc_lab import study
from cachesvc_lab.index_file import StoredIndex, read_index, write_index, write_requests
from kvcache.v1 import admin_pb2_grpc, inspect_pb2

from cachesvc_ctl.blocks import held_back, tree_line
from cachesvc_ctl.core.command import (
    Command,
    DaemonCommand,
    at_least_one,
    describe_bytes,
    flag,
    hex_digits,
    left_out,
    part_file,
    table,
)
from cachesvc_ctl.status import model_flag, require_model

DUMP_DEADLINE_SECONDS = 600.0


def _summary(index: StoredIndex, arguments: argparse.Namespace) -> str:
    head = index.head
    taken = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(head["taken_unix_seconds"]))
    about = (
        f"{head['model']}: {len(index):,} blocks of {head['block_tokens']} tokens, taken {taken}, {head['eviction']}"
    )
    pools = table(
        ("place", "group", "pages", "free", "page"),
        [(p["place"], p["group"], p["capacity"], p["free"], describe_bytes(p["page_bytes"])) for p in head["pools"]],
    )
    whole = max(1, len(index))
    where = table(
        ("blocks lie on", "blocks", "share"),
        [(name or "nowhere", n, f"{n / whole:.1%}") for name, n in study.tier_shares(index).most_common()],
    )
    depths = table(
        ("position in prompt", "blocks", "share"),
        [(f"{a:,} to {b:,}", n, f"{n / whole:.1%}") for a, b, n in study.depth_histogram(index)],
    )
    few = min(arguments.limit, 10)
    hot = _rows(index, [block for block in study.hottest(index, few) if index.hits[block]])
    return f"{about}\n\n{pools}\n\n{where}\n\n{depths}\n\nhottest prefixes\n{hot}"


def _rows(index: StoredIndex, blocks: list[int]) -> str:
    rows = [
        (
            index.key(b)[:16],
            index.position[b],
            index.children[b],
            index.pins[b],
            index.hits[b],
            index.stamp[b],
            study.tiers(index, b),
        )
        for b in blocks
    ]
    return table(("key", "position", "children", "pins", "hits", "last access", "places"), rows)


def _blocks(index: StoredIndex, arguments: argparse.Namespace) -> str:
    return _rows(index, study.newest(index, arguments.limit))


def _tree(index: StoredIndex, arguments: argparse.Namespace) -> str:
    top = study.find(index, arguments.key) if arguments.key else -1
    found = study.tree(index, top, arguments.depth, arguments.limit)
    lines = [
        tree_line(
            node.depth,
            index.key(node.block),
            index.position[node.block],
            study.tiers(index, node.block),
            index.children[node.block],
            node.below,
        )
        for node in found.nodes
    ]
    held = held_back(is_deep=found.is_deep, is_long=found.is_long)
    return ("\n".join(lines) or "none") + (left_out(*held) if held else "")


def _next(index: StoredIndex, arguments: argparse.Namespace) -> str:
    names = index.head["places"]
    wanted = arguments.place or names[min(1, len(names) - 1)]
    if wanted not in names:
        raise InvalidRequest(f"this dump has no place {wanted!r}; it has {', '.join(names)}")
    return _rows(index, list(islice(study.next_out(index, names.index(wanted)), arguments.limit)))


VIEWS = {"summary": _summary, "tree": _tree, "blocks": _blocks, "next": _next}


class Dump(DaemonCommand):
    name = "dump"
    about = "write a model's index or last requests to a file"
    flags = (
        flag("file", type=Path, metavar="FILE", help="JSON lines; with a name in .zst compressed"),
        model_flag(),
        flag("--requests", action="store_true", help="the last requests, as a trace for simulate and replay"),
    )

    def run(self) -> int:
        """Leaves no file unless it is whole. Raises OSError, MissingExtraError, UnknownModel, InvalidRequest."""
        began = time.monotonic()
        with part_file(self.arguments.file) as part, self.target.open() as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            request = inspect_pb2.DumpIndexRequest(
                model_id=require_model(admin, self.arguments.model).model_id,
                recent_requests=self.arguments.requests,
            )
            said = self._write(part, admin.DumpIndex(request, timeout=DUMP_DEADLINE_SECONDS))
        size = describe_bytes(self.arguments.file.stat().st_size)
        print(f"{said} in {self.arguments.file} ({size}, {time.monotonic() - began:.1f} s)")
        return 0

    def _write(self, part: Path, parts: Iterable[inspect_pb2.DumpIndexResponse]) -> str:
        if not self.arguments.requests:
            return f"{write_index(part, parts):,} blocks"
        if not self.arguments.file.name.endswith((".jsonl", ".jsonl.zst")):
            raise InvalidRequest("a trace has a name that ends in .jsonl or .jsonl.zst")
        written = write_requests(part, parts)
        return f"{written.requests:,} requests, for --block-tokens {written.block_tokens},"


class Load(Command):
    name = "load"
    about = "study a dumped index; no daemon is needed"
    flags = (
        flag("file", type=Path, metavar="FILE", help="written by cachesvc dump"),
        flag("view", nargs="?", choices=tuple(VIEWS), default="summary", help="default summary"),
        flag("--key", type=hex_digits, metavar="HEX", help="tree: start there; its first digits do"),
        flag("--depth", type=at_least_one, default=6, metavar="N", help="tree: levels at most (default 6)"),
        flag("--place", default="", metavar="NAME", help="next: evicted from where (default: replica 0)"),
        flag("--limit", type=at_least_one, default=40, metavar="N", help="lines at most (default 40)"),
    )

    def run(self) -> int:
        """Raises IndexFileError, MissingExtraError, InvalidRequest."""
        print(VIEWS[self.arguments.view](read_index(self.arguments.file), self.arguments))
        return 0
