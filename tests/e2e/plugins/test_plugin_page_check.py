"""vLLM's connector finds a write into a sealed page, where its operator looks for one."""

from __future__ import annotations

import pytest
from cachesvc_client.plugins.keeper import ConnectorRefused
from cachesvc_client.plugins.node import PageChanged, PageCheck

from tests.e2e.engine import Engine, prompt
from tests.e2e.rig import Node, running_node


def test_a_write_into_a_sealed_page_is_found_in_the_next_check() -> None:
    with running_node(["--checksums", "all"]) as node, Engine(node.socket) as engine:
        served = engine.serve(prompt(1, 3))
        check = PageCheck(node.socket, None, 1, steps=2)
        for _ in range(4):
            check.step()
        page = served.pages[0][1]
        for plane in engine.pool.page(engine.layout.groups[0].name, page).values():
            plane.view("uint8")[...] ^= 1
        check.step()
        with pytest.raises(PageChanged, match=f"at iteration 6: .*page: {page}"):
            check.step()


def test_without_checksums_the_operator_is_told_how_to_get_them(node: Node) -> None:
    with pytest.raises(ConnectorRefused, match="--checksums all"):
        PageCheck(node.socket, None, 0, steps=1).step()
    PageCheck(node.socket, None, 0, steps=0).step()


def test_where_the_daemon_does_not_answer_it_is_said() -> None:
    with pytest.raises(ConnectorRefused, match="the daemon did not verify"):
        PageCheck("/nowhere/kv.sock", None, 0, steps=1).check("the start")
