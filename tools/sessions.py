"""Records the sessions of docs/inspecting.md from a daemon at work: ``python -m tools.sessions``.

A session stands between ``<!-- session: NAME -->`` and ``<!-- end -->``. What is shown is what the commands printed;
only the socket's path and the binaries' are those of an installation, and long output is cut where ``...`` stands.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.lively import lively_daemon

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "inspecting.md"
BUF = ROOT / ".tools" / "buf" / "node_modules" / ".bin" / "buf"
SESSION = re.compile(r"<!-- session: ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)
KEY = re.compile(r'"keyHex": "([0-9a-f]{12})|^([0-9a-f]{12})[0-9a-f]{4}  ', re.MULTILINE)
"""Key of an answer in JSON, or of a line of ``cachesvc blocks``."""

TABLE = re.compile(r"<!-- table: inspection -->\n.*?<!-- end -->", re.DOTALL)
FIGURES = ROOT / "benchmarks" / "results" / "inspection.json"
SOCKET = "/run/cachesvc/cachesvc.sock"
CURL = f"buf curl --protocol grpc --http2-prior-knowledge --unix-socket {SOCKET}"
ADMIN = "http://localhost/kvcache.v1.AdminService"
LINES = 110

SESSIONS: dict[str, tuple[str, ...]] = {
    "list": (
        f"{CURL} --list-services http://localhost",
        f"{CURL} --list-methods http://localhost",
    ),
    "describe": (
        "cachesvc describe kvcache.v1.AdminService",
        "cachesvc describe kvcache.v1.GetTreeRequest",
        "cachesvc describe kvcache.v1.TreeNode",
    ),
    "status": (f"""{CURL} -d '{{"brief": true}}' {ADMIN}/GetStatus""",),
    "tree": (f"""{CURL} -d '{{"modelId": 1, "depth": 3, "limit": 4}}' {ADMIN}/GetTree""",),
    "blocks": (
        f"""{CURL} -d '{{"modelId": 1, "order": "BLOCK_ORDER_HITS", "limit": 1}}' {ADMIN}/ListBlocks""",
        f"""{CURL} -d '{{"modelId": 1, "keyHex": "$KEY", "depth": 2}}' {ADMIN}/GetTree""",
    ),
    "verify": (f"""{CURL} -d '{{"checksums": true}}' {ADMIN}/Verify""", "cachesvc verify --checksums"),
    "why": ("cachesvc blocks --order hits --limit 2", "cachesvc why $KEY"),
    "ctl": ("cachesvc status", "cachesvc top --once", "cachesvc tree --depth 3 --limit 8", "cachesvc leases"),
    "json": ("cachesvc leases --json", "cachesvc sequences --json --limit 1"),
    "dump": (
        "cachesvc dump index.jsonl.zst",
        "cachesvc load index.jsonl.zst",
        "cachesvc load index.jsonl.zst next --limit 5",
    ),
    "drain": (f"{CURL} -d '{{}}' {ADMIN}/Drain", "cachesvc leases"),
}
"""In the order in which they are recorded; the last one ends the daemon's willingness. ``$KEY``: digits of a block."""


def main() -> None:
    """Record everything and write the document."""
    text = TABLE.sub(
        lambda _: f"<!-- table: inspection -->\n{table()}\n<!-- end -->", DOCUMENT.read_text(encoding="utf-8")
    )
    with tempfile.TemporaryDirectory() as folder, lively_daemon() as daemon:
        recorded = {name: record(name, daemon.socket, Path(folder)) for name in SESSIONS}

    def session(match: re.Match[str]) -> str:
        shown = "\n".join(f"$ {command}\n{shorten(output)}\n" for command, output in recorded[match[1]])
        return f"<!-- session: {match[1]} -->\n```console\n{shown.rstrip()}\n```\n<!-- end -->"

    DOCUMENT.write_text(SESSION.sub(session, text), encoding="utf-8")


def record(name: str, socket: str, folder: Path) -> list[tuple[str, str]]:
    """Run a session's commands; each as a reader types it, with what it printed."""
    out: list[tuple[str, str]] = []
    key = ""
    for command in SESSIONS[name]:
        typed = command.replace("$KEY", key)
        output = run(typed, socket, folder)
        found = KEY.search(output)
        key = (found[1] or found[2]) if found else key
        out.append((typed, output))
    return out


def run(command: str, socket: str, folder: Path) -> str:
    """Output of a command. Raises RuntimeError for one that fails."""
    real = command.replace(SOCKET, socket)
    if command.startswith("buf "):
        real = real.replace("buf ", f"{BUF} ", 1)
    else:
        cli = f"{sys.executable} -m cachesvc_ctl"
        offline = command.startswith("cachesvc load")
        real = real.replace("cachesvc ", f"{cli} ", 1) + ("" if offline else f" --socket {socket}")
    ended = subprocess.run(real, shell=True, capture_output=True, text=True, check=False, cwd=folder)  # noqa: S602
    if ended.returncode:
        raise RuntimeError(f"{command}: exit {ended.returncode}\n{ended.stdout}{ended.stderr}")
    output = ended.stdout.replace(socket, SOCKET).rstrip()
    if output.startswith("{"):
        output = json.dumps(json.loads(output), indent=2)
    return re.sub(r"(\"?socket\"?:? +\"?)[^\s\"]+", rf"\g<1>{SOCKET}", output)


def shorten(output: str) -> str:
    """At most ``LINES`` lines, with ``...`` where some were left out."""
    lines = output.splitlines()
    return "\n".join([*lines[: LINES - 1], "..."] if len(lines) > LINES else lines)


def documented(text: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Sessions of the document: name, and (command, output) pairs."""
    for match in re.finditer(r"<!-- session: ([\w-]+) -->\n```console\n(.*?)\n```\n<!-- end -->", text, re.DOTALL):
        pairs = [part.split("\n", 1) for part in re.split(r"^\$ ", match[2], flags=re.MULTILINE)[1:]]
        yield match[1], [(pair[0], pair[1].strip() if len(pair) > 1 else "") for pair in pairs]


def shape(output: str) -> str | set[str]:
    """Constant part of an output: the names of JSON fields, or the first line without its numbers, keys and tiers."""
    if output.startswith("{"):
        return set(re.findall(r"^ *\"(\w+)\":", output, re.MULTILINE))
    first = output.splitlines()[0] if output else ""
    words = re.sub(r"\b[0-9a-f]{6,}\b|[\d.,]*\d%?( (?:[KMGT]iB|B|s|ms)\b)?", "N", first)
    words = words.replace("device+host", "device")
    return re.sub(r" +", " ", words)


def table() -> str:
    """Cost of questions about a large index, from benchmarks/results/inspection.json."""
    found = json.loads(FIGURES.read_text(encoding="utf-8"))

    def row(name: str, step: dict[str, float], took: str) -> str:
        return f"| {name} | {step['p50']:.2f} | {step['p99']:.2f} | {took} |"

    rows = [row("nothing", found["alone_ms"], "")]
    rows += [row(name, asked["step_ms"], f"{asked['seconds']:.2f}") for name, asked in found["questions"].items()]
    machine = found["machine"]
    head = "| asked again and again meanwhile | Step p50 ms | Step p99 ms | the question takes s |"
    about = f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, {machine['date']}"
    return "\n".join([head, "| --- | --- | --- | --- |", *rows, "", f"<sub>{found['blocks']:,} blocks; {about}</sub>"])


if __name__ == "__main__":
    main()
