"""Loads from the host on a rank that follows: each layer waits for this rank's part, and its end is reported."""

from __future__ import annotations

from collections.abc import Sequence

from cachesvc_client.adapters.layer_waits import LayerWaits
from cachesvc_client.plugins.daemon.node import Node

from cachesvc_sglang.common.host_loads import LOOK_S, SOUND, LoadBegin, current_stream, end_of
from cachesvc_sglang.ranks.links import LeaderLink


class RankLoads:
    """SGLang's counter of layers. ``num_layers``: of the KV pool. Used from SGLang's scheduler thread."""

    def __init__(self, node: Node, leader: LeaderLink, num_layers: int) -> None:
        self.num_layers = num_layers
        self._node = node
        self._leader = leader
        self._known: dict[str, LoadBegin] = {}
        self._reported: set[int] = set()
        self._launched: list[LoadBegin] = []
        self._waits = LayerWaits(lambda: node.pool, current_stream)

    def begin(self, request_id: str, load: LoadBegin) -> None:
        """Look at the load of a request. Idempotent."""
        known = self._known.get(request_id)
        if known is None or known.number != load.number:
            self.forget(request_id)
            self._known[request_id] = load

    def report(self) -> None:
        """Report the loads that have ended."""
        for load in self._known.values():
            self._report(load, 0.0)

    def forget(self, request_id: str) -> None:
        """Forget a request's load."""
        load = self._known.pop(request_id, None)
        if load is not None:
            self._reported.discard(load.number)

    def forget_all(self) -> None:
        """Forget all loads: there is a new lease."""
        self._known.clear()
        self._reported.clear()

    def begin_step(self, requests: Sequence[str]) -> None:
        """A step is launched: its layers wait for the loads of these requests."""
        self._launched = [self._known[each] for each in requests]
        self._waits.begin(ticket for load in self._launched for ticket in load.tickets)

    def end_launch(self) -> bool:
        """Wait for the loads of the step that was launched, and report them; False where it has none."""
        launched, self._launched = self._launched, []
        for load in launched:
            while not self._report(load, LOOK_S):
                pass
        if launched:
            self._leader.answer(SOUND, self._waits.is_sound)
        self._waits.begin(())
        return bool(launched)

    def _report(self, load: LoadBegin, wait_s: float) -> bool:
        """True once the end of a load was reported."""
        if load.number in self._reported:
            return True
        has_come = end_of(self._node.pool, load.tickets, wait_s)
        if has_come is None:
            return False
        self._reported.add(load.number)
        self._leader.end_load(load.number, has_come=has_come)
        return True

    @property
    def consumer_index(self) -> int:
        """Negative while no step waits."""
        return 0 if self._launched else -1

    def wait_until(self, layer: int) -> None:
        """SGLang is about to use a layer of the step that it launches."""
        self._waits.wait(layer)
