"""The example of two nodes behind a router, as a newcomer runs it, and over a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cachesvc_client import block_keys

from examples.disaggregated import Asked, Pair, Way
from examples.engine import answer_alone
from examples.tiny_transformer.model import TinyTransformer, build_model
from examples.tiny_transformer.tokens import Tokens
from tests.e2e.rig import short_folder
from tests.e2e.storage.network import Network
from tests.unit.examples.tiny_rig import make_prompt, with_blocks

ROOT = Path(__file__).resolve().parents[3]
NEW_TOKENS = 12
BLOCK_TOKENS = 16


def test_the_example_is_token_identical() -> None:
    flags = "--conversations 1 --letters 90 --new-tokens 3"
    command = [sys.executable, "-m", "examples.disaggregated", *flags.split()]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every answer is the reference's" in done.stdout
    assert Way.HAND_OVER.value in done.stdout
    assert Way.STAY.value in done.stdout
    assert " tail " in done.stdout


def small() -> TinyTransformer:
    return build_model(with_blocks("gqa", BLOCK_TOKENS, max_positions=256))


def ask(pair: Pair, prompt: Tokens) -> Asked:
    asked = pair.ask(prompt, NEW_TOKENS)
    assert asked.answer.tokens == answer_alone(pair.model, prompt, NEW_TOKENS, 0.0, "to compare with").tokens
    assert asked.answer.went_alone == ""
    return asked


def test_two_nodes_over_a_network() -> None:
    """Blocks of one node are a hit on the other; the router knows it by their events; and one of them may go."""
    prompt = make_prompt(100, seed=3)
    with short_folder() as folder, Network(folder) as network, network.node(0) as one, network.node(1) as two:
        with Pair(small(), one.socket, two.socket) as pair:
            keys = block_keys(pair.namespace, prompt, BLOCK_TOKENS)
            first = ask(pair, prompt)
            assert (first.route.way, first.handed_tail) == (Way.HAND_OVER, True)
            assert first.answer.host_tokens == len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
            assert pair.router.decode.catch_up(keys)
            again = ask(pair, prompt)
            assert (again.route.way, again.route.on_decode) == (Way.STAY, len(prompt) // BLOCK_TOKENS)
            one.daemon.process.kill()
            one.daemon.process.wait()
            gone = ask(pair, make_prompt(90, seed=4))
            assert gone.route.on_prefill == 0
        assert two.problems() == []
