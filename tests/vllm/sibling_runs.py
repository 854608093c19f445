"""Another connector of a MultiConnector that loads prompts from elsewhere, into pages of vLLM's scheduler.

A process of its own: ``python -m tests.vllm.sibling_runs NAME SOCKET SEED``. A second engine reads what is shared.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from vllm.v1.outputs import KVConnectorOutput

from tests.vllm.scheduling import VOCABULARY, Engine
from tests.vllm.scheduling_runs import STATES, WINDOWS, WINDOWS_ALONE, cached, run_out
from tests.vllm.shape import Shape

OFFERED, PROMPT = 56, 57
"""Tokens that the sibling loads of a prompt, and all of its tokens."""


class LoadingEngine(Engine):
    """``offered``: by request, the number of its tokens that the sibling loads. ``loads_late``: while the request
    waits; else in the step that computes behind them. ``holds``: loads do not come yet."""

    def __init__(self, name: str, socket: str, seed: int, shape: Shape, *, loads_late: bool) -> None:
        super().__init__(name, socket, seed, shape)
        self.offered: dict[str, int] = {}
        self.holds = False
        self._loads_late = loads_late
        self._chosen: set[str] = set()
        self._loads: dict[str, tuple[Any, int, int]] = {}
        self._ask, self._note = self.connector.get_num_new_matched_tokens, self.connector.update_state_after_alloc
        self.connector.get_num_new_matched_tokens = self._offer
        self.connector.update_state_after_alloc = self._begin

    def _offer(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """Offer as a MultiConnector does: the first one that has tokens loads them."""
        name, (tokens, is_late) = request.request_id, self._ask(request, computed_tokens)
        more = self.offered.get(name, 0) - computed_tokens
        if tokens is None or tokens > 0 or more <= 0:
            return tokens, is_late
        self._chosen.add(name)
        return more, self._loads_late

    def _begin(self, request: Any, blocks: Any, external_tokens: int) -> None:
        name = request.request_id
        is_mine = name in self._chosen and external_tokens > 0
        self._note(request, blocks, 0 if is_mine else external_tokens)
        if is_mine:
            self._chosen.discard(name)
            end = self.offered[name]
            self._loads[name] = blocks.get_block_ids(), end - external_tokens, end

    def is_loading(self, name: str) -> bool:
        """True where the load of a request has not come yet."""
        return name in self._loads

    def _execute(self, step: Any) -> Any:
        loads = {} if self.holds else self._loads
        self._loads = self._loads if self.holds else {}
        if loads:
            self.worker.slots[list(step.said.new_block_ids_to_zero or ())] = 0  # what is zeroed is so before a load
            step.said.new_block_ids_to_zero = None
        for name, (tables, first, end) in loads.items():
            assert (name in step.said.num_scheduled_tokens) != self._loads_late
            digests = self.model.digests(self._tokens[name])
            for group, table in zip(self.shape.groups, tables, strict=True):
                for at in range(first, end):
                    if page := table[at // group.block_tokens]:
                        self.worker.slots[page, at % group.block_tokens] = digests[at]
        output = super()._execute(step)
        if self._loads_late and loads:
            told = output.kv_connector_output or KVConnectorOutput()
            told.finished_recving = (told.finished_recving or set()) | loads.keys()
            output.kv_connector_output = told
        return output


def loaded(socket: str, seed: int, shape: Shape, *, loads_late: bool, shared_tokens: int) -> list[Engine]:
    """Have a sibling load a prompt, and a second engine read what is shared of it: ``shared_tokens`` of what was
    loaded."""
    rng = random.Random(seed)
    one = LoadingEngine("e0", socket, seed, shape, loads_late=loads_late)
    two = Engine("e1", socket, seed + 1, shape)
    one.add([rng.randrange(VOCABULARY) for _ in range(100)], 4)  # pages that are granted next hold something
    run_out(one)
    prompt = [rng.randrange(VOCABULARY) for _ in range(PROMPT)]
    one.offered[f"e0-{len(one.requests)}"] = OFFERED
    one.add(prompt, 12)
    run_out(one)
    found = {cut: cached(two, [*prompt[:cut], 1, 2, 3], 4) for cut in (24, 40, OFFERED)}
    assert found[24] == min(24, shared_tokens), found
    assert found[OFFERED] >= shared_tokens, found
    return [one, two]


def aborted(socket: str, seed: int) -> list[Engine]:
    """Abort a request whose load has not come: the second engine finds none of it."""
    rng = random.Random(seed)
    one = LoadingEngine("e0", socket, seed, Shape(), loads_late=True)
    two = Engine("e1", socket, seed + 1, Shape())
    prompt = [rng.randrange(VOCABULARY) for _ in range(PROMPT)]
    one.offered["e0-0"], one.holds = OFFERED, True
    name = one.add(prompt, 12)
    while not one.is_loading(name):
        one.step()
        one.settle()
    one.abort(name)
    one.step()
    one.settle()
    assert cached(two, [*prompt, 1, 2, 3], 4) == 0
    one.holds = False
    run_out(one)
    return [one, two]


RUNS = {
    f"{name}-{when}": (Shape(**shape, is_async=when == "late"), when == "late", shared)
    for name, shape, shared in (
        ("full", {}, OFFERED),
        ("windows", WINDOWS, 0),
        ("windows-alone", WINDOWS_ALONE, 0),
        ("states", STATES, 0),
    )
    for when in ("now", "late")
}


def main() -> None:
    """Run, and tell."""
    name, socket, seed = sys.argv[1:]
    if name == "aborted":
        engines = aborted(socket, int(seed))
    else:
        shape, is_late, shared = RUNS[name]
        engines = loaded(socket, int(seed), shape, loads_late=is_late, shared_tokens=shared)
    whole = sum(engine.check_answers() for engine in engines)
    for engine in engines:
        assert engine.leftovers() == {}, engine.leftovers()
        engine.close()
    print(json.dumps({"whole": whole}))


if __name__ == "__main__":
    main()
