"""Two nodes behind a small router: one prefills, one decodes, and what either has computed is a hit on both.

    python -m examples.disaggregated

Starts two daemons on this machine that lend to each other, an engine of each kind on them, and a router that follows
the KV events of both. Conversations are asked turn by turn; every answer must be, token by token, what an engine
without a cache answers. What is to be looked at is `Router.route` and `Pair.ask`; the rest is one process in place of
four.
"""

from __future__ import annotations

import argparse
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum

from cachesvc_client import (
    KEY_BYTES,
    AttachedPool,
    BlockMirror,
    CacheClient,
    CacheClientError,
    EventSubscriber,
    Lease,
    block_keys,
)
from cachesvc_ctl.core.daemon_process import DaemonProcess

from examples.engine import Answer, CachedEngine, answer_alone, layout_of
from examples.handover import DecodeEngine, PrefillEngine
from examples.texts import Conversation, conversations
from examples.tiny_transformer.model import TinyTransformer, build_model
from examples.tiny_transformer.tokens import Tokens, chat_prompt
from examples.tiny_transformer.variants import VARIANTS

POOL_BLOCKS = 320
CATCH_UP_SECONDS = 5.0


class Way(Enum):
    """Ways to answer a prompt."""

    HAND_OVER = "prefill on one node, decode on the other"
    STAY = "all on the node that decodes: it has most of the prompt"


@dataclass(frozen=True, slots=True)
class Route:
    """Blocks of the prompt that each node has, as far as the router knows."""

    way: Way
    on_prefill: int
    on_decode: int


class Follower:
    """View of one node's cache by its events: a hint, as fresh as the last of them."""

    def __init__(self, socket_path: str, namespace: bytes) -> None:
        self._events = EventSubscriber(socket_path, namespace)
        self._mirror = BlockMirror()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._follow, name="follow", daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._events.close()
        self._thread.join()

    def blocks(self, keys: bytes) -> int:
        """Number of leading blocks of a prompt that the node has in any tier."""
        with self._changed:
            count = 0
            while (key := keys[count * KEY_BYTES : (count + 1) * KEY_BYTES]) and key in self._mirror.locations:
                count += 1
            return count

    def catch_up(self, keys: bytes) -> bool:
        """Wait until the node is known to have all of a prompt; False where that does not come to pass."""
        with self._changed:
            return self._changed.wait_for(
                lambda: all(
                    keys[at : at + KEY_BYTES] in self._mirror.locations for at in range(0, len(keys), KEY_BYTES)
                ),
                CATCH_UP_SECONDS,
            )

    def _follow(self) -> None:
        """Root of the thread. A node that goes has nothing."""
        try:
            for batch in self._events.follow():
                with self._changed:
                    self._mirror.apply(batch)
                    self._changed.notify_all()
        except CacheClientError:
            with self._changed:
                self._mirror = BlockMirror()
                self._changed.notify_all()


class Router:
    """Sends a prompt where most of it is. A wrong guess costs time and nothing else: daemons look for themselves."""

    def __init__(self, prefill: Follower, decode: Follower) -> None:
        self.prefill = prefill
        self.decode = decode

    def route(self, keys: bytes) -> Route:
        """A prompt of which the decoding node has half or more stays there: the rest is a short prefill."""
        on_prefill, on_decode = self.prefill.blocks(keys), self.decode.blocks(keys)
        stays = on_decode * 2 >= len(keys) // KEY_BYTES and on_decode >= on_prefill and on_decode > 0
        return Route(Way.STAY if stays else Way.HAND_OVER, on_prefill, on_decode)


@dataclass(frozen=True, slots=True)
class Asked:
    """One question's answer and the way that it went; ``handed_tail``: its last block came over too."""

    answer: Answer
    route: Route
    seconds: float
    handed_tail: bool


class Pair:
    """A prefilling and a decoding node of one model, and the router before them."""

    def __init__(self, model: TinyTransformer, prefill_socket: str, decode_socket: str) -> None:
        self.model = model
        self._sockets = prefill_socket, decode_socket
        self._stack = ExitStack()

    def __enter__(self) -> Pair:
        with ExitStack() as stack:
            one, two = (self._room(stack, socket_path) for socket_path in self._sockets)
            self.namespace = one[0].registration.namespace
            self._prefill = PrefillEngine(self.model, *one)
            self._decode = DecodeEngine(self.model, *two)
            self._whole = CachedEngine(self.model, *two)
            followers = [stack.enter_context(Follower(path, self.namespace)) for path in self._sockets]
            self.router = Router(followers[0], followers[1])
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ask(self, prompt: Tokens, new_tokens: int) -> Asked:
        """Answer a prompt. Where the prefilling node is gone, the decoding one does all of it."""
        began = time.perf_counter()
        route = self.router.route(block_keys(self.namespace, prompt, self.model.config.block_tokens))
        tails = self._decode.tails
        if route.way is Way.STAY:
            answer = self._whole.answer(prompt, new_tokens)
        else:
            try:
                first = self._prefill.prefill(prompt).first_token
                answer = self._decode.answer(prompt, first, new_tokens)
            except CacheClientError:
                answer = self._whole.answer(prompt, new_tokens)
        return Asked(answer, route, time.perf_counter() - began, self._decode.tails > tails)

    def _room(self, stack: ExitStack, socket_path: str) -> tuple[Lease, AttachedPool]:
        layout = layout_of(self.model.config)
        pages = [POOL_BLOCKS] * len(layout.groups)
        client = stack.enter_context(CacheClient(socket_path, engine="disaggregated"))
        registration = client.register(f"{self.model.config.name}@1", layout, device_pages=pages, host_pages=pages)
        lease = stack.enter_context(client.open_lease(registration))
        return lease, stack.enter_context(lease.attach())


def ask_all(pair: Pair, some: Sequence[Conversation], letters: int, turns: int, new_tokens: int) -> int:
    """Ask the first turns of some conversations, with ``letters`` of their texts; returns the number of wrong
    answers."""
    wrong = 0
    for conversation in some:
        answers: list[Sequence[int]] = []
        for turn in range(1, min(turns, len(conversation.turns)) + 1):
            prompt = chat_prompt(conversation.document[:letters], conversation.turns[:turn], answers)
            asked = pair.ask(prompt, new_tokens)
            reference = answer_alone(pair.model, prompt, new_tokens, time.perf_counter(), "the reference")
            is_right = asked.answer.tokens == reference.tokens
            wrong += not is_right
            answers.append(reference.tokens)
            found = asked.answer.device_tokens + asked.answer.host_tokens
            sys.stdout.write(
                f"{conversation.name:9} turn {turn}  {len(prompt):5} tokens  {found:5} found  "
                f"{'tail' if asked.handed_tail else '    '}  {asked.seconds * 1e3:7.1f} ms  "
                f"{'identical' if is_right else 'WRONG'}  {asked.route.way.value}\n"
            )
            sys.stdout.flush()
    return wrong


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def node_flags(own_port: int, other_port: int) -> list[str]:
    """Flags of a daemon that lends to another one on this machine, and borrows from it."""
    pools = ["--backend", "shm", "--device-pool", "256MiB", "--host-pool", "128MiB"]
    return [*pools, "--peer-listen", f"127.0.0.1:{own_port}", "--peers", f"127.0.0.1:{other_port}?wait=2s"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 where every answer was right."""
    parser = argparse.ArgumentParser(prog="python -m examples.disaggregated", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--variant", default="tiny-gqa-fp8", choices=sorted(VARIANTS), help="which model")
    parser.add_argument("--conversations", type=int, default=3, help="how many (default 3)")
    parser.add_argument("--letters", type=int, default=400, help="of each conversation's text (default 400)")
    parser.add_argument("--turns", type=int, default=2, help="of each conversation (default 2)")
    parser.add_argument("--new-tokens", type=int, default=16, help="of each answer (default 16)")
    options = parser.parse_args(arguments)
    ports = free_ports(2)
    model = build_model(VARIANTS[options.variant])
    with (
        DaemonProcess(node_flags(ports[0], ports[1]), whole=True) as one,
        DaemonProcess(node_flags(ports[1], ports[0]), whole=True) as two,
        Pair(model, one.socket, two.socket) as pair,
    ):
        wrong = ask_all(
            pair, conversations()[: options.conversations], options.letters, options.turns, options.new_tokens
        )
    sys.stdout.write("every answer is the reference's\n" if not wrong else f"{wrong} answers are wrong\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
