"""vLLM in a fleet: data parallel ranks, another connector beside ours, prefill and decode on two nodes."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvcache.v1 import admin_pb2

from tests.e2e.rig import Node, running_node, wait_until
from tests.forked_process import PipedProcess
from tests.vllm.rig import BLOCK_TOKENS, Engine, Fleet, engines, forker, random_prompt


def data_parallel(fleet: Fleet, *socket: str) -> PipedProcess:
    """Two ranks on a daemon, or one plain engine."""
    return forker().start("tests.vllm.ranks_process", str(fleet.folder), *socket)


def test_data_parallel_ranks_hit_in_place_what_another_has_computed(fleet: Fleet) -> None:
    with data_parallel(fleet) as plain:
        expected = [tokens for _, tokens in json.loads(_last_line(plain))]
    with running_node() as node, data_parallel(fleet, node.socket) as ranks:
        answers = json.loads(_last_line(ranks))
        assert [tokens for _, tokens in answers] == expected
        assert [cached // BLOCK_TOKENS for cached, _ in answers] == [0, 31, 31, 15]
        assert list(node.lease_states().values()) == ["live", "live"], "a lease for each, though ids begin alike"
        assert len(list(node.admin.ListModels(admin_pb2.ListModelsRequest()).models)) == 1


def test_beside_another_connector_processes_share_in_place_what_either_loads(
    fleet: Fleet, plain: Engine, tmp_path: Path
) -> None:
    prompts = [random_prompt(seed, 6.5) for seed in (50, 51)]
    expected = [plain.ask(prompt)[0].said for prompt in prompts]
    options = multi_connector
    with running_node() as node:
        for found in (0, 6):
            with engines(fleet.engine(None, options=options(node.socket, tmp_path))) as (mine,):
                answers = [mine.ask(prompt)[0] for prompt in prompts]
                assert [answer.said for answer in answers] == expected
                assert [answer.cached // BLOCK_TOKENS for answer in answers] == [found, found]
        assert node.problems() == []
    for share, found in ((False, 0), (True, 6)):
        with running_node() as empty:
            with engines(fleet.engine(None, options=options(empty.socket, tmp_path, share=share))) as (mine,):
                answers = [mine.ask(prompt)[0] for prompt in prompts]
                assert [answer.said for answer in answers] == expected
                assert all(answer.cached for answer in answers), "the other connector has them"
            with engines(fleet.engine(None, options=options(empty.socket, tmp_path / "none"))) as (mine,):
                answers = [mine.ask(prompt)[0] for prompt in prompts]
                assert [answer.cached // BLOCK_TOKENS for answer in answers] == [found, found], share
                assert [answer.said for answer in answers] == expected
            assert empty.problems() == []


def test_a_decoder_finds_by_key_what_a_prefiller_of_another_node_has_computed(fleet: Fleet, plain: Engine) -> None:
    prompt = random_prompt(60, 20.5)
    expected = plain.ask(prompt)[0].said
    lending = ["--peer-listen", "127.0.0.1:0", "--write-policy", "write_through"]
    with ExitStack() as nodes:
        prefill = nodes.enter_context(running_node(lending))
        decode = nodes.enter_context(running_node(["--peers", f"{_peer_address(prefill)}?wait=5s&deadline=20s"]))
        with engines(fleet.engine(prefill.socket), fleet.engine(decode.socket)) as (first, second):
            first.ask(prompt)
            wait_until(lambda: prefill.pages("sealed", "host") >= 20, "the host has them")
            (answer,) = second.ask(prompt)
            assert answer.said == expected
            assert answer.cached == 20 * BLOCK_TOKENS
            assert decode.counters()["hit_blocks_storage"] == 20
        assert decode.problems() == []


def multi_connector(socket: str, folder: Path, *, share: bool = True) -> dict[str, Any]:
    """vLLM's options for ours, which may ``share`` what the other loads, and one of its own."""
    both = {"kv_role": "kv_both"}
    ours = {"kv_connector": "CachesvcConnector", "kv_connector_module_path": "cachesvc_vllm", **both}
    example = {"kv_connector": "ExampleConnector", **both}
    children = [
        {**ours, "kv_connector_extra_config": {"socket": socket, "share_loaded": share}},
        {**example, "kv_connector_extra_config": {"shared_storage_path": str(folder)}},
    ]
    return {
        "kv_transfer_config": {
            "kv_connector": "MultiConnector",
            **both,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": children},
        }
    }


def _last_line(process: PipedProcess) -> str:
    return next(line for line in process.stdout if line.startswith("[["))


def _peer_address(node: Node) -> str:
    events = map(json.loads, node.log().splitlines())
    return f"127.0.0.1:{next(event['port'] for event in events if event['event'] == 'peers_ready')}"
