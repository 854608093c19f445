"""Prefill on one node, decode on another: what is prefilled there is not computed here."""

from __future__ import annotations

import pytest

from tests.e2e.rig import Node, running_node
from tests.vllm.harness import daemon_faults, run_module

PREFILLS = ("--peer-listen", "127.0.0.1:0", "--write-policy", "write_through")
DECODES = ("--peer-allow", "127.0.0.0/8")


def handed_over(runs: str, prefiller: Node, decoder: Node) -> dict[str, int]:
    faults = daemon_faults(prefiller.daemon.kill, prefiller.daemon.start)
    return run_module("tests.vllm.handover_runs", runs, prefiller.socket, decoder.socket, faults=faults)


@pytest.mark.parametrize("runs", ["one-after-another,at-once,bad-words", "prefiller-dies"])
def test_what_another_node_prefills_is_not_computed_here(runs: str) -> None:
    with running_node(PREFILLS) as prefiller, running_node(DECODES) as decoder:
        told = handed_over(runs, prefiller, decoder)
        assert min(told.values()) > 0
        assert decoder.problems() == []
        counters = decoder.counters()
        if "dies" in runs:
            assert counters["expectations_ended_unreachable"] > 0
        else:
            assert counters["expectations_ended_arrived"] >= 30
            assert prefiller.problems() == []
