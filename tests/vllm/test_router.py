"""vLLM's router, unmodified, before two real engines on two daemons: one prefills, the other decodes."""

from __future__ import annotations

import json
import os
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.e2e.rig import Node, running_node, short_folder
from tests.e2e.storage.network import PORT, Network
from tests.routers.rig import PACKAGES_VARIABLE, free_ports, running_router
from tests.vllm.long_cases import long
from tests.vllm.rig import BLOCK_TOKENS, Answer, Engine, Fleet, Prompt, engines, random_prompt

pytestmark = pytest.mark.skipif(PACKAGES_VARIABLE not in os.environ, reason="make vllm-test installs the routers")
REQUESTS = 200 if "CACHESVC_LONG" in os.environ else 8
WAIT_S = 120.0
LENDS = ("--peer-data-port", "0", "--write-policy", "write_through")
LOSS = 0.01


class Front:
    """The HTTP server of an engine: completions of token ids, with a router's words in and out."""

    def __init__(self, engine: Engine) -> None:
        self.answers: list[Answer] = []
        self.asked: list[Any] = []
        self._engine = engine
        self._lock = threading.Lock()
        front = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                """Say nothing."""

            def do_GET(self) -> None:
                self._tell({"object": "list", "data": [{"id": "m", "object": "model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._tell(front.complete(body))

            def _tell(self, what: Any) -> None:
                told = json.dumps(what).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(told)))
                self.end_headers()
                self.wfile.write(told)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def complete(self, body: Any) -> dict[str, Any]:
        """Answer a completion."""
        words = body.get("kv_transfer_params")
        sampling = {} if words is None else {"extra_args": {"kv_transfer_params": words}}
        with self._lock:
            [answer] = self._engine.ask(Prompt(tuple(body["prompt"]), body["max_tokens"], sampling=sampling))
            self.asked.append(words)
            self.answers.append(answer)
        text = " ".join(map(str, answer.tokens[0]))
        choice = {"index": 0, "text": text, "finish_reason": "length", "logprobs": None}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(answer.tokens[0])}
        usage["total_tokens"] = sum(usage.values())
        told: dict[str, Any] = {"id": "x", "object": "text_completion", "created": 0, "model": "m"}
        return told | {"choices": [choice], "usage": usage, "kv_transfer_params": answer.handover}


@contextmanager
def fronts(served: Sequence[Engine]) -> Iterator[list[Front]]:
    with ExitStack() as stack:
        made = []
        for engine in served:
            front = Front(engine)
            threading.Thread(target=front.server.serve_forever, daemon=True).start()
            stack.callback(front.server.shutdown)
            made.append(front)
        yield made


@contextmanager
def router(prefill: Front, decode: Front) -> Iterator[str]:
    with short_folder() as folder:
        port, metrics_port = free_ports(2)
        command = [sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation"]
        command += ["--kv-connector", "nixl", "--prefill", prefill.url, "--decode", decode.url]
        command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
        with running_router(command, port, folder / "log"):
            yield f"http://127.0.0.1:{port}/v1/completions"


def complete(url: str, prompt: Prompt) -> tuple[int, ...]:
    body = {"model": "m", "prompt": list(prompt.tokens), "max_tokens": prompt.new, "temperature": 0}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        return tuple(map(int, json.loads(answer.read())["choices"][0]["text"].split()))


@contextmanager
def near_nodes() -> Iterator[tuple[Node, Node]]:
    """A prefilling and a decoding node on loopback."""
    lends, borrows = [*LENDS, "--peer-listen", "127.0.0.1:0"], ["--peer-allow", "127.0.0.0/8"]
    with running_node(lends) as prefiller, running_node(borrows) as decoder:
        yield prefiller, decoder


@contextmanager
def far_nodes(delay_ms: int) -> Iterator[tuple[Node, Node]]:
    """The same, each in a network namespace: packets come ``delay_ms`` later, and one of a hundred never does."""
    with short_folder() as folder, Network(folder) as network:
        lends = [*LENDS, "--peer-listen", f"{network.address(0)}:{PORT}", *network.trust(0)]
        borrows = ["--peer-allow", f"{network.address(0)}/32", *network.trust(1)]
        far = network.delay(delay_ms / 1000, LOSS)
        with network.daemon(0, lends) as prefiller, network.daemon(1, borrows) as decoder:
            yield prefiller, decoder
        assert far.lost, "packets of this test were lost"


@pytest.mark.parametrize("delay_ms", [long(0), long(1), 20])
def test_what_the_router_has_prefilled_is_decoded_elsewhere_with_equal_tokens(
    fleet: Fleet, plain: Engine, delay_ms: int
) -> None:
    prompts = [random_prompt(seed, 2 + 5.3 * (seed % 4)) for seed in range(REQUESTS)]
    expected = [answer.tokens[0] for answer in plain.ask(*prompts)]
    extra = {"remote_patience_ms": 60_000}
    apart = far_nodes(delay_ms) if delay_ms else near_nodes()
    with apart as nodes, engines(*(fleet.engine(node.socket, extra=extra) for node in nodes)) as both:
        with fronts(both) as (prefill, decode), router(prefill, decode) as url:
            assert [complete(url, prompt) for prompt in prompts] == expected
        assert [words["do_remote_decode"] for words in prefill.asked] == [True] * REQUESTS
        assert [len(answer.tokens[0]) for answer in prefill.answers] == [1] * REQUESTS
        assert [answer.cached for answer in decode.answers] == [0] * REQUESTS, "vLLM tells of the prefiller's hits here"
        counters = nodes[1].counters()
        least = sum((len(prompt.tokens) - 1) // BLOCK_TOKENS for prompt in prompts)
        most = sum(-(-len(prompt.tokens) // BLOCK_TOKENS) for prompt in prompts)  # where the last blocks come too
        assert least <= counters["hit_blocks_storage"] <= counters["expected_blocks"] <= most
        assert counters.get("published_blocks", 0) <= REQUESTS, "the decoder computes the last token of a prompt alone"
        assert [node.problems() for node in nodes] == [[], []]
