"""Display names and versions of weights, as operators give them and engines get them."""

from __future__ import annotations

import signal
from typing import Any

import grpc
import pytest
from cachesvc_client import CacheClient, DeadlineExceeded, InvalidRequest, Registration
from cachesvc_client.core.errors import error_of
from kvcache.v1 import admin_pb2

from tests.e2e.engine import PLAIN
from tests.e2e.operators.test_operators import Run, ask, run
from tests.e2e.rig import Node

__all__ = ["run"]


def register(client: CacheClient, model: str, display_name: str = "") -> Registration:
    return client.register(model, PLAIN, device_pages=[4], host_pages=[0], display_name=display_name)


def refused(node: Node, **fields: Any) -> Exception:
    with pytest.raises(grpc.RpcError) as caught:
        node.admin.SetWeightsVersion(admin_pb2.SetWeightsVersionRequest(**fields))
    return error_of(caught.value)


def test_an_announced_version_reaches_engines_with_their_registration(run: Run, node: Node) -> None:
    with CacheClient(node.socket) as client:
        assert register(client, "vllm-1", "llama").weights_version == ""
        assert ask(run, node, "weights", "llama")[0] == "no version of weights was announced\n"
        for before in ("none", "step-1"):  # the second time nothing changes
            code, text = run("weights", "--socket", node.socket, "llama", "step-1")
            assert (code, text) == (0, f"announced step-1; before: {before}\n")
        assert ask(run, node, "weights", "llama")[0] == "step-1\n"
        assert "step-1" in ask(run, node, "models")[0]
        found = register(client, "vllm-1", "llama")
        assert (found.existed, found.weights_version) == (True, "step-1")
        assert register(client, "vllm-2", "other").weights_version == "", "another model's"


def test_an_engine_waits_no_longer_for_a_daemon_that_hangs_than_it_says(node: Node) -> None:
    process = node.daemon.process
    assert process is not None
    with CacheClient(node.socket) as client:
        register(client, "vllm-1")
        process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineExceeded):
                client.register("vllm-1", PLAIN, device_pages=[4], host_pages=[0], timeout_s=0.2)
        finally:
            process.send_signal(signal.SIGCONT)
        assert register(client, "vllm-1").existed


@pytest.mark.parametrize("version", ["", "x" * 129, "\u00e9" * 65, "step\n1", "\x1b[2J"])
def test_a_version_that_is_none_is_refused_and_changes_nothing(node: Node, version: str) -> None:
    with CacheClient(node.socket) as client:
        registration = register(client, "vllm-1")
        error = refused(node, model_id=registration.model_id, version=version)
        assert isinstance(error, InvalidRequest)
        assert "1 to 128 bytes of printable text" in str(error)
        assert register(client, "vllm-1").weights_version == ""


def test_a_version_of_a_model_that_is_not_there_is_refused(node: Node) -> None:
    assert "model" in str(refused(node, model_id=7, version="step-1"))


def test_models_go_by_display_name_and_an_ambiguous_one_is_refused_with_the_candidates(run: Run, node: Node) -> None:
    with CacheClient(node.socket) as client:
        register(client, "vllm-1", "llama")
        register(client, "vllm-2", "qwen")
        text, answer = ask(run, node, "models")
        assert "llama" in text
        assert "vllm-1" in text
        assert [each["display_name"] for each in answer["models"]] == ["llama", "qwen"]
        for command in (["blocks"], ["tree"], ["evict"], ["verify"]):
            ask(run, node, *command, "--model", "llama")
        register(client, "vllm-3", "llama")
        code, text = run("weights", "--socket", node.socket, "llama", "step-1")
        assert (code, text) == (
            2,
            "cachesvc: which of 2 models? name one by its number: 1 (llama, vllm-1), 3 (llama, vllm-3)\n",
        )
        ask(run, node, "weights", "vllm-3", "step-1")
        ask(run, node, "weights", "1", "step-2")
        assert register(client, "vllm-3").weights_version == "step-1"
