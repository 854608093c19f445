"""Prefill on one node, decode on another: what is prefilled there is not computed here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvcache.v1 import admin_pb2

from tests.e2e.rig import Node, running_node
from tests.routers.rig import free_ports
from tests.vllm.harness import daemon_faults, run_module
from tests.vllm.long_cases import long
from tests.vllm.rig import BLOCK_TOKENS, Engine, Fleet, Prompt, engines, random_prompt

WELL = "one-after-another,at-once,bad-words,sent-twice,never-computed"
TAILS = "crowded,own-copies,other-tails,aborted,evicted,spoilt"
DECODES = ("--peer-allow", "127.0.0.0/8")


def handed_over(runs: str, prefiller: Node, decoder: Node, scheduling: str = "sync") -> dict[str, int]:
    nodes = {"prefiller": prefiller, "decoder": decoder}

    def evict(_: object, name: str, *tiers: str) -> None:
        for tier in tiers:
            nodes[name].admin.Evict(admin_pb2.EvictRequest(model_id=1, tier=tier))

    faults = daemon_faults(prefiller.daemon.kill, prefiller.daemon.start) | {"@evict": evict}
    sockets = prefiller.socket, decoder.socket
    return run_module("tests.vllm.handover_runs", runs, *sockets, scheduling, faults=faults)


@pytest.mark.parametrize(
    ("runs", "scheduling"),
    [(WELL, "sync"), long(TAILS, "sync"), (TAILS, "async"), ("prefiller-restarts,prefiller-dies", "sync")],
)
def test_what_another_node_prefills_is_not_computed_here(runs: str, scheduling: str) -> None:
    [port] = free_ports(1)
    prefills = (*DECODES, "--peer-listen", f"127.0.0.1:{port}", "--write-policy", "write_through")
    with running_node(prefills) as prefiller, running_node(DECODES) as decoder:
        told = handed_over(runs, prefiller, decoder, scheduling)
        assert min(told.values()) > 0
        assert decoder.problems() == []
        counters = decoder.counters()
        assert counters["expectations_ended_absent"] > 0
        if "dies" in runs:
            assert counters["expectations_ended_unreachable"] > 0
        else:
            assert counters["expectations_ended_arrived"] >= (30 if runs == WELL else 10)
            if runs == WELL:
                assert prefiller.counters()["expectations_ended_absent"] > 0, "nor does a node wait for itself"
            assert prefiller.problems() == []


def handed(prompt: Prompt, one: Engine, **changed: object) -> Prompt:
    """A prompt that one engine has prefilled, as a router passes it on, without the word that vLLM would answer with in
    place of the tokens that it has found."""
    asked = {"extra_args": {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}}
    [told] = one.ask(replace(prompt, new=1, sampling=asked))
    assert told.handover is not None
    words = {name: word for name, word in told.handover.items() if name != "remote_prefill_cached_tokens"}
    return replace(prompt, sampling={"extra_args": {"kv_transfer_params": words | changed}})


def test_a_prompt_that_ends_within_a_block_is_decoded_elsewhere_by_computing_its_last_token(
    fleet: Fleet, plain: Engine
) -> None:
    prompts = [random_prompt(seed, blocks, new=40) for seed, blocks in enumerate((0.5, 2.1, 3.9, 5.0, 7.5))]
    prompts.append(replace(prompts[0], salt="a tenant's"))
    expected = [answer.tokens for answer in plain.ask(*prompts)]
    lends = ("--peer-listen", "127.0.0.1:0", "--write-policy", "write_through")
    with running_node(lends) as prefiller, running_node(DECODES) as decoder:
        started = fleet.engine(prefiller.socket), fleet.engine(decoder.socket, extra={"remote_patience_ms": 60_000})
        with engines(*started) as (one, two):
            for prompt, tokens in zip(prompts, expected, strict=True):
                for engine in (two, two, one):  # from the other node, in place, and on the prefilling node
                    [answer] = engine.ask(handed(prompt, one))
                    assert (answer.tokens, answer.cached) == (tokens, len(prompt.tokens) - 1)
                [follow] = plain.ask(longer := replace(prompt, tokens=(*prompt.tokens, *tokens[0])))
                [answer] = two.ask(longer)
                assert answer.tokens == follow.tokens
                assert answer.cached == (len(longer.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            end = replace(prompts[1], tokens=(*prompts[1].tokens[:-2], 5, 6))
            passed_on = handed(prompts[1], one)
            [answer] = two.ask(replace(end, sampling=passed_on.sampling))
            assert (answer.tokens, answer.cached) == (plain.ask(end)[0].tokens, 2 * BLOCK_TOKENS)
        assert [node.problems() for node in (prefiller, decoder)] == [[], []]
