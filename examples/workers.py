"""Workers that compute for an engine's scheduler: one process's model over its pool, or several ranks side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from cachesvc_client import AttachedPool, TicketView

from examples.engine import LOAD_SECONDS, planes_of
from examples.tiny_transformer.arrays import Array
from examples.tiny_transformer.config import F32
from examples.tiny_transformer.model import TinyTransformer, WaitLayer, Work, shard_model

EXCHANGE_SECONDS = 30.0  # for the slowest rank to reach a layer's heads


class Worker(Protocol):
    """Interface that a scheduler needs. ``tickets``: loads that the works' tables rely on."""

    @property
    def model(self) -> TinyTransformer:
        """The whole model."""
        ...

    def compute(self, works: Sequence[Work], tickets: Sequence[TicketView]) -> list[F32]:
        """Compute like ``TinyTransformer.compute``, each layer once it has loaded."""
        ...

    def guess(self, works: Sequence[Work], tickets: Sequence[TicketView]) -> list[F32]:
        """Guess like ``TinyTransformer.guess``."""
        ...


class PoolWorker:
    """A model over one attached pool."""

    def __init__(self, model: TinyTransformer, pool: AttachedPool) -> None:
        self.model = model
        self._pool = pool
        self.planes = planes_of(model, pool)

    def compute(self, works: Sequence[Work], tickets: Sequence[TicketView]) -> list[F32]:
        """Compute like ``TinyTransformer.compute``, each layer once it has loaded."""
        return self.model.compute(works, self.planes, self._waiter(tickets))

    def guess(self, works: Sequence[Work], tickets: Sequence[TicketView]) -> list[F32]:
        """Guess like ``TinyTransformer.guess``."""
        return self.model.guess(works, self.planes, self._waiter(tickets))

    def _waiter(self, tickets: Sequence[TicketView]) -> WaitLayer:
        def wait(layer: int) -> None:
            for ticket in tickets:
                self._pool.wait_layer(ticket, layer, LOAD_SECONDS)

        return wait


class StreamWorker(PoolWorker):
    """A model in torch over a pool on a GPU: a stream waits for each layer, the processor does not."""

    def __init__(self, model: TinyTransformer, pool: AttachedPool) -> None:
        import torch

        super().__init__(model, pool)
        self._torch = torch
        self._stream = torch.cuda.Stream()
        torch.cuda.synchronize()  # the weights are there

    def compute(self, works: Sequence[Work], tickets: Sequence[TicketView]) -> list[F32]:
        """Compute like ``TinyTransformer.compute``; the result is used only once the loads are known to be complete."""
        with self._torch.cuda.stream(self._stream):
            logits = super().compute(works, tickets)
        self._confirm(tickets)
        return logits

    def guess(self, works: Sequence[Work], tickets: Sequence[TicketView]) -> list[F32]:
        """Guess like ``TinyTransformer.guess``; the result is used only once the loads are known to be complete."""
        with self._torch.cuda.stream(self._stream):
            logits = super().guess(works, tickets)
        self._confirm(tickets)
        return logits

    def _waiter(self, tickets: Sequence[TicketView]) -> WaitLayer:
        def wait(layer: int) -> None:
            for ticket in tickets:
                self._pool.wait_layer_on(self._stream, ticket, layer)

        return wait

    def _confirm(self, tickets: Sequence[TicketView]) -> None:
        self._stream.synchronize()
        self._pool.confirm(*tickets)


class HeadExchange:
    """Every rank's heads for every rank, between threads; a real engine asks NCCL to gather them."""

    def __init__(self, ranks: int) -> None:
        self._parts: list[Array] = [None] * ranks
        self._barrier = threading.Barrier(ranks)

    def of(self, rank: int) -> Callable[[Array], Array]:
        """The exchange of one rank. Raises BrokenBarrierError when another rank failed."""

        def exchange(mine: Array) -> Array:
            self._parts[rank] = mine
            self._barrier.wait(EXCHANGE_SECONDS)
            heads = np.concatenate(self._parts, axis=0)
            self._barrier.wait(EXCHANGE_SECONDS)  # no rank overwrites a part that another has not read yet
            return heads

        return exchange

    def abort(self) -> None:
        """Release the other ranks after a rank failed."""
        self._barrier.abort()


class RankWorkers:
    """Ranks of one model, each on its own attached pool and in its own thread: heads are shared out, a latent is not.

    The ranks' block tables are the same, because they share one page-id space. Ends with ``close``.
    """

    def __init__(self, model: TinyTransformer, pools: Sequence[AttachedPool]) -> None:
        self.model = model
        self._exchange = HeadExchange(len(pools))
        self.ranks = [
            PoolWorker(shard_model(model, rank, len(pools), self._exchange.of(rank)), pool)
            for rank, pool in enumerate(pools)
        ]
        self._threads = ThreadPoolExecutor(len(pools), thread_name_prefix="rank")

    def compute(self, works: Sequence[Work], tickets: Sequence[TicketView]) -> list[F32]:
        """All ranks compute; the first one's logits, which are everybody's."""
        return self._run(lambda rank: rank.compute(works, tickets))

    def guess(self, works: Sequence[Work], tickets: Sequence[TicketView]) -> list[F32]:
        """All ranks guess."""
        return self._run(lambda rank: rank.guess(works, tickets))

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def __enter__(self) -> RankWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, call: Callable[[PoolWorker], list[F32]]) -> list[F32]:
        def run(rank: PoolWorker) -> list[F32]:
            is_done = False
            try:
                logits = call(rank)
                is_done = True
            finally:
                if not is_done:
                    self._exchange.abort()
            return logits

        answers = [future.result() for future in [self._threads.submit(run, rank) for rank in self.ranks]]
        for other in answers[1:]:
            for mine, theirs in zip(answers[0], other, strict=True):
                np.testing.assert_array_equal(mine, theirs)
        return answers[0]
