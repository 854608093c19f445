"""``cachesvc dump`` writes a model's index to a file, ``cachesvc load`` studies it without a daemon."""

from __future__ import annotations

import argparse
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

from kvcache.v1 import admin_pb2_grpc, inspect_pb2

from cachesvc_ctl import offline as study
from cachesvc_ctl.index_file import StoredIndex, read_index, write_index
from cachesvc_ctl.inspect import DEADLINE_SECONDS, table
from cachesvc_ctl.lab.report import describe_bytes
from cachesvc_ctl.target import add_target, count, target_of

VIEWS = ("summary", "tree", "blocks", "next")
DUMP_DEADLINE_SECONDS = 20 * DEADLINE_SECONDS


def add_commands(commands: Any) -> None:
    """Add them to the parser."""
    text = "write a model's index (keys, never tokens) to a file for study"
    dump = commands.add_parser("dump", help=text, description=text)
    dump.add_argument("file", type=Path, metavar="FILE", help="JSON lines; with a name in .zst compressed")
    dump.add_argument("--model", type=count, default=1, metavar="ID", help="default 1")
    add_target(dump)
    dump.set_defaults(command=_dump)
    text = "study a dumped index; no daemon is needed"
    load = commands.add_parser("load", help=text, description=text)
    load.add_argument("file", type=Path, metavar="FILE", help="written by cachesvc dump")
    load.add_argument("view", nargs="?", choices=VIEWS, default="summary", help="default summary")
    load.add_argument("--key", default="", metavar="HEX", help="tree: start at this block; its first digits do")
    load.add_argument("--depth", type=count, default=6, metavar="N", help="tree: levels at most (default 6)")
    load.add_argument("--limit", type=count, default=40, metavar="N", help="lines at most (default 40)")
    load.add_argument("--place", default="", metavar="NAME", help="next: evicted from where (default: replica 0)")
    load.set_defaults(command=_load)


def _dump(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    part = arguments.file.with_name(arguments.file.name + ".part")
    # The suffix decides how it is written, so the unfinished file carries it too.
    part = part.with_suffix(".part.zst") if arguments.file.suffix == ".zst" else part
    try:
        with target_of(arguments).open() as channel:
            request = inspect_pb2.DumpIndexRequest(model_id=arguments.model)
            parts = admin_pb2_grpc.AdminServiceStub(channel).DumpIndex(request, timeout=DUMP_DEADLINE_SECONDS)
            blocks = write_index(part, parts)
        part.replace(arguments.file)
    finally:
        part.unlink(missing_ok=True)
    size = describe_bytes(arguments.file.stat().st_size)
    print(f"{blocks:,} blocks in {arguments.file} ({size}, {time.monotonic() - began:.1f} s)")
    return 0


def _load(arguments: argparse.Namespace) -> int:
    index = read_index(arguments.file)
    views = {"summary": _summary, "tree": _tree, "blocks": _blocks, "next": _next}
    try:
        print(views[arguments.view](index, arguments))
    except ValueError as error:
        print(f"cachesvc: {error}", file=sys.stderr)
        return 2
    return 0


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
    nodes, truncated = study.tree(index, top, arguments.depth, arguments.limit)
    lines = [
        f"{'  ' * node.depth}{index.key(node.block)[:16]}  block {index.position[node.block]}, "
        f"{study.tiers(index, node.block)}, {index.children[node.block]} children, {node.below:,} below"
        for node in nodes
    ]
    return ("\n".join(lines) or "none") + ("\n(more are there; raise --limit or --depth)" if truncated else "")


def _next(index: StoredIndex, arguments: argparse.Namespace) -> str:
    names = index.head["places"]
    wanted = arguments.place or names[min(1, len(names) - 1)]
    if wanted not in names:
        raise ValueError(f"this dump has no place {wanted!r}; it has {', '.join(names)}")
    return _rows(index, list(islice(study.next_out(index, names.index(wanted)), arguments.limit)))
