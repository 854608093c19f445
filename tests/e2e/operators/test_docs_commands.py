"""Commands of the documents work as printed: each page's run in one shell, in its order, beside a daemon of their own.

A fence of ``sh`` runs, unless the line before it is ``<!-- not run: REASON -->``: then its flags are parsed alone. A
fence of ``text`` below ``<!-- prints -->`` has what the fence before it prints: each line begins one of the output, in
that order. The folders /tmp and /run/cachesvc are ones of the test's, and so are the ports.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from cachesvc_ctl.main import parse

from cachesvc.__main__ import read_flags
from tests.style.tree import ROOT

PAGES = {
    page: ROOT / path
    for page, path in {
        "README": "README.md",
        **{name: f"docs/{name}.md" for name in ("first-steps", "vllm", "nodes", "operating", "integrating", "gpu")},
        **{name: f"docs/{name}.md" for name in ("deploying", "upgrading", "troubleshooting", "index", "sglang")},
    }.items()
}
REASONS = ("installs from", "needs a GPU", "needs a cluster", "needs several machines", "needs ", "takes minutes")
FENCE = re.compile(
    r"(?:<!-- not run: (?P<why>[^\n]*) -->\n)?```sh\n(?P<body>.*?)\n```"
    r"(?:\n\n<!-- prints -->\n```text\n(?P<prints>.*?)\n```)?",
    re.DOTALL,
)
NAMES = "cachesvcd?|pip|vllm|docker|kubectl|make|python"
COMMAND = re.compile(rf"^    (?:\$ )?(?:[./\w-]*/)?(?:{NAMES}) [^|\n]*(?<!\.\.\.)$", re.MULTILINE)
DAEMON = "cachesvcd --socket /tmp/own.sock --device-pool 16MiB --host-pool 4MiB 2>/tmp/own.log &\n"
ENGINE = """
prompt = list(range(128))
def run_attention(pool, sequence):
    print("computed from block", sequence.hit_blocks)
"""


class Fence(NamedTuple):
    """Commands of one fence. ``why``: the reason why they do not run, or empty."""

    body: str
    why: str
    prints: tuple[str, ...]


def fences(page: str) -> list[Fence]:
    """Fences of commands of a page, in their order."""
    text = PAGES[page].read_text(encoding="utf-8")
    found = (match.groupdict() for match in FENCE.finditer(text))
    return [Fence(each["body"], each["why"] or "", tuple((each["prints"] or "").splitlines())) for each in found]


def words_of(body: str) -> Iterator[list[str]]:
    """Commands of a fence, word by word, without what runs before or behind them."""
    held = ""
    for line in body.replace("\\\n", " ").splitlines():
        held += line + "\n"
        try:
            words = shlex.split(held, comments=True)
        except ValueError:  # a quotation goes on in the next line
            continue
        held = ""
        while "&&" in words:
            words = words[words.index("&&") + 1 :]
        ends = [at for at, word in enumerate(words) if word in {"&", "|", "<"} or re.match(r"[12]?>", word)]
        yield words[: ends[0]] if ends else words


def here(text: str, folder: str, port: int) -> str:
    """A text with the test's own folders and ports."""
    text = text.replace("/run/cachesvc/", f"{folder}/").replace("/tmp/", f"{folder}/")
    return text.replace("127.0.0.1:7100", f"127.0.0.1:{port}")


def free_port() -> int:
    """A port that no process has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run(script: str, folder: str) -> subprocess.CompletedProcess[str]:
    """Run commands as a shell does, in the repository; what runs behind them ends with it."""
    environment = dict(os.environ, CACHESVC_SOCKET=f"{folder}/own.sock", GRPC_VERBOSITY="NONE")
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    script = "set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null; wait' EXIT\n" + script
    return subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("page", [page for page in PAGES if any(not fence.why for fence in fences(page))])
def test_commands_work_as_printed(page: str) -> None:
    port = free_port()
    runs = [fence for fence in fences(page) if not fence.why]
    with tempfile.TemporaryDirectory(prefix="docs-") as folder:
        script = "\n".join(fence.body for fence in runs)
        if "cachesvcd " not in script:
            script = f"{DAEMON}cachesvc wait --timeout 60 > /dev/null\n{script}"
        ended = run(here(script, folder, port), folder)
        logs = "".join(path.read_text() for path in Path(folder).glob("*.log"))
        assert ended.returncode == 0, f"{page}: {ended.stderr}\n{ended.stdout}\n{logs[-2000:]}"
        left = iter(ended.stdout.splitlines())
        for line in (line for fence in runs for line in fence.prints):
            assert any(printed.startswith(line) for printed in left), f"{page} does not print {line!r}:\n{ended.stdout}"


def test_the_engine_of_the_front_page_runs_and_handles_a_full_hit() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGES["README"].read_text(encoding="utf-8"), re.DOTALL)
    with tempfile.TemporaryDirectory(prefix="docs-") as folder:
        path = Path(folder, "engine.py")
        path.write_text(ENGINE + code + code.partition("with CacheClient")[1] + code.partition("with CacheClient")[2])
        daemon = DAEMON.replace("16MiB", "64MiB").replace("4MiB", "16MiB", 1)
        script = f"{daemon}cachesvc wait --timeout 60 > /dev/null\npython /tmp/engine.py"
        ended = run(here(script, folder, free_port()), folder)
    assert ended.stdout.splitlines() == ["computed from block 0", "computed from block 1"], ended.stderr


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_do_not_run_have_a_reason_and_flags_that_there_are(page: str) -> None:
    for fence in fences(page):
        assert not fence.why or fence.why.startswith(REASONS), f"{page}: {fence.why}"
        for words in words_of(fence.body):
            if words[:1] == ["cachesvcd"]:
                read_flags(words[1:])
            elif words[:1] == ["cachesvc"] and not {"...", "NAME", "KEY"} & set(words):
                parse(words[1:])


@pytest.mark.parametrize("page", PAGES)
def test_commands_stand_in_fences(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", PAGES[page].read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert not COMMAND.findall(text), "a command without a fence is not checked"
