"""Prefill on one node, decode on another: the steps that the two engines add to a plain engine's.

    prefill                                       decode
    compute the prompt, and its first token
    publish the full blocks
    publish the tail under a key of its own
    tell the first token       ── router ──▶      match the full blocks: they come over from the other node
                                                  match the tail too, copy it to a page of one's own, let go of it
                                                  decode from the second token on

The tail is the last block where it is not full: a page that is final on the one side, and one that
the decoding engine goes on writing on the other. What does not come over (the other node died, the link is cut) is
computed again; nothing here fails a request.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from cachesvc_client import (
    KEY_BYTES,
    AttachedPool,
    BlockHasher,
    CacheClientError,
    Lease,
    Sequence,
)

from examples.engine import LOAD_SECONDS, Answer, answer_alone, name_tables, planes_of, seal_blocks
from examples.tiny_transformer.generate import Drafts, generate
from examples.tiny_transformer.model import Tables, TinyTransformer, WaitLayer
from examples.tiny_transformer.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Data that goes to the decoding node with the prompt."""

    first_token: int
    seconds: float
    cached_tokens: int


class PrefillEngine:
    """Computes prompts and leaves them in its node's cache."""

    def __init__(self, model: TinyTransformer, lease: Lease, pool: AttachedPool) -> None:
        self._model = model
        self._lease = lease
        self._pool = pool
        self._planes = planes_of(model, pool)

    def prefill(self, prompt: Tokens) -> Prefilled:
        """Compute a prompt and publish all of it for any engine. Raises CacheClientError."""
        began = time.perf_counter()
        hasher = BlockHasher(self._lease.registration.namespace, self._model.config.block_tokens)
        hasher.extend(prompt)
        with self._lease.match(reusable(hasher, len(prompt))) as sequence:
            cached = sequence.hit_blocks * hasher.block_tokens

            def tables_for(blocks: int, _: int) -> Tables:
                sequence.allocate(blocks)
                return name_tables(sequence, self._pool.layout)

            first = next(
                generate(self._model, prompt, cached, 1, tables_for, self._planes, waiter(sequence, self._pool))
            )
            if tail := hasher.tail_key():
                sequence.publish(hasher.blocks + 1, bytes(hasher.keys) + tail)
            else:
                seal_blocks(sequence, hasher, len(prompt))
        return Prefilled(first, time.perf_counter() - began, cached)


class DecodeEngine:
    """Answers prompts that another node has computed. ``tails``: last blocks that came over."""

    def __init__(self, model: TinyTransformer, lease: Lease, pool: AttachedPool) -> None:
        self.tails = 0
        self._model = model
        self._lease = lease
        self._pool = pool
        self._planes = planes_of(model, pool)

    def answer(self, prompt: Tokens, first_token: int, new_tokens: int) -> Answer:
        """The answer to a prompt whose first token is known. No request fails because of the cache."""
        began = time.perf_counter()
        try:
            return self._answer(prompt, first_token, new_tokens, began)
        except CacheClientError as error:
            return answer_alone(self._model, prompt, new_tokens, began, f"{type(error).__name__}: {error}")

    def _answer(self, prompt: Tokens, first_token: int, new_tokens: int, began: float) -> Answer:
        hasher = BlockHasher(self._lease.registration.namespace, self._model.config.block_tokens)
        hasher.extend(prompt)
        keys, tail = bytes(hasher.keys), hasher.tail_key()
        known = np.append(prompt, np.int32(first_token))
        if tail:  # all of it comes over at once; what follows finds it on this node
            self._lease.match(keys + tail).release()
        with self._lease.match(keys) as sequence:
            cached = sequence.hit_blocks * hasher.block_tokens
            hasher.extend([first_token])
            answer = [first_token]

            def tables_for(blocks: int, computed_tokens: int) -> Tables:
                if len(answer) > 1:
                    seal_blocks(sequence, hasher, computed_tokens)
                sequence.allocate(blocks)
                return name_tables(sequence, self._pool.layout)

            if tail and sequence.hit_blocks == len(prompt) // hasher.block_tokens:
                sequence.allocate(sequence.hit_blocks + 1)
                if self._take_tail(sequence, keys + tail):
                    cached = len(prompt)
            stream: Iterator[int] = generate(
                self._model,
                known,
                cached,
                new_tokens - 1,
                tables_for,
                self._planes,
                waiter(sequence, self._pool),
                Drafts(),
            )
            first_token_seconds = time.perf_counter() - began
            for token in stream:
                answer.append(token)
                hasher.extend([token])
            seal_blocks(sequence, hasher, len(prompt) + max(new_tokens, 1) - 1)
            return Answer(
                answer,
                first_token_seconds,
                device_tokens=sequence.device_blocks * hasher.block_tokens,
                host_tokens=sequence.host_blocks * hasher.block_tokens,
            )

    def _take_tail(self, sequence: Sequence, keys: bytes) -> bool:
        """Copy the prompt's last block from the page that came over to the sequence's own; False where none did."""
        last = sequence.hit_blocks
        with self._lease.match(keys) as lent:
            if lent.hit_blocks <= last:
                return False
            lent.allocate(last + 1)
            lent.wait_loaded(LOAD_SECONDS)
            for group, (own, theirs) in enumerate(zip(sequence.tables, lent.tables, strict=True)):
                name = self._pool.layout.groups[group].name
                for (of, _, _), pages in self._planes.items():
                    if of == name:
                        pages[own[last]] = pages[theirs[last]]
        self.tails += 1
        return True


def reusable(hasher: BlockHasher, prompt_tokens: int) -> bytes:
    """Keys of full blocks that leave a token to compute: the first one of the answer comes out of its logits."""
    return bytes(hasher.keys[: (prompt_tokens - 1) // hasher.block_tokens * KEY_BYTES])


def waiter(sequence: Sequence, pool: AttachedPool) -> WaitLayer:
    """Waits for a layer of what a sequence loads."""

    def wait_layer(layer: int) -> None:
        for ticket in sequence.tickets:
            pool.wait_layer(ticket, layer, LOAD_SECONDS)

    return wait_layer
