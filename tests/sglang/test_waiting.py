"""Requests that wait are matched ahead of their turn; of one that is aborted meanwhile nothing is left. None is
admitted before its match has an answer."""

from __future__ import annotations

import json

from tests.e2e.rig import running_node
from tests.sglang.rig import forker


def test_nothing_is_kept_of_an_aborted_request_and_none_is_admitted_before_its_answer() -> None:
    with running_node() as node:
        pid = str(node.daemon.process.pid)
        told = json.loads(forker().run("tests.sglang.waiting_cache", node.socket, pid)[-1])
    assert told["left"] == [], "it would be matched, and pin its hit for good"
    assert told["admitted"] == [False, True], "what SGLang was not told of would be computed over"
