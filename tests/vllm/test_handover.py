"""Prefill on one node, decode on another: what is prefilled there is not computed here."""

from __future__ import annotations

import pytest

from tests.e2e.rig import Node, running_node
from tests.routers.rig import free_ports
from tests.vllm.harness import daemon_faults, run_module

WELL = "one-after-another,at-once,bad-words,sent-twice,never-computed"
DECODES = ("--peer-allow", "127.0.0.0/8")


def handed_over(runs: str, prefiller: Node, decoder: Node) -> dict[str, int]:
    faults = daemon_faults(prefiller.daemon.kill, prefiller.daemon.start)
    return run_module("tests.vllm.handover_runs", runs, prefiller.socket, decoder.socket, faults=faults)


@pytest.mark.parametrize("runs", [WELL, "prefiller-restarts,prefiller-dies"])
def test_what_another_node_prefills_is_not_computed_here(runs: str) -> None:
    [port] = free_ports(1)
    prefills = (*DECODES, "--peer-listen", f"127.0.0.1:{port}", "--write-policy", "write_through")
    with running_node(prefills) as prefiller, running_node(DECODES) as decoder:
        told = handed_over(runs, prefiller, decoder)
        assert min(told.values()) > 0
        assert decoder.problems() == []
        counters = decoder.counters()
        assert counters["expectations_ended_absent"] > 0
        if "dies" in runs:
            assert counters["expectations_ended_unreachable"] > 0
        else:
            assert counters["expectations_ended_arrived"] >= 30
            assert prefiller.counters()["expectations_ended_absent"] > 0, "nor does a node wait for itself"
            assert prefiller.problems() == []
