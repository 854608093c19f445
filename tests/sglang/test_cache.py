"""SGLang's cache call by call, on a daemon and without an engine: what only pressure or an abort brings about."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.rig import running_node
from tests.sglang.rig import forker
from tests.vllm.rig import check_daemon

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found() -> Found:
    """Findings of each run of ``cache_runs``. At its end the daemons hold nothing for it."""
    with running_node() as node, running_node(["--fault-copies", "0.3"]) as faulty:
        said: Found = run("cache_runs", node.socket, faulty.socket)
        return said


def run(module: str, *arguments: str) -> Any:
    """Run a module by the Python that has SGLang; what it printed last."""
    return json.loads(forker().run(f"tests.sglang.{module}", *arguments)[-1])


def test_of_a_request_that_is_aborted_before_its_match_nothing_stays(found: Found) -> None:
    assert found["aborted_before_its_match"] == {"held": False, "hit_tokens": 0}


def test_a_request_that_a_pass_has_admitted_keeps_its_pages(found: Found) -> None:
    assert found["admitted_beside_one_without_room"] == {"has_room": False, "is_kept": True}


def test_what_came_from_the_host_and_was_given_back_is_loaded_again(found: Found) -> None:
    assert found["loaded_and_given_back"] == {"from_host": 12, "in_place": 0, "on_host": 12 * 16}


def test_a_request_whose_load_failed_is_asked_for_again_and_computes_what_it_lacks(found: Found) -> None:
    failed = found["load_failed"]
    assert failed == {"is_asked_for_again": True, "is_admitted": True, "from_host": 0, "has_slots": True}


def test_one_message_to_the_daemon_comes_before_the_first_token_of_a_request_that_is_alone(found: Found) -> None:
    """Blocks found in place and on the host, and the messages: a second one would be a wait, or stand before a step."""
    sent = found["messages_before_output"]
    assert (sent["in_place"], sent["from_host"], sent["computed"]) == ([12, 0, 1], [0, 12, 1], [0, 0, 1])


def test_while_a_request_waits_a_step_s_launch_sends_what_is_to_be_sent(found: Found) -> None:
    """Its own message, the other one's match, and the step's: a new match has its answer before it is needed."""
    assert found["messages_before_output"]["beside"] == [0, 0, 3]


def test_a_request_s_next_chunk_is_whole_on_a_pool_that_is_nearly_full(found: Found) -> None:
    """SGLang would cut it to what is left. Were more of it free a moment later, a second request would be cut too."""
    assert found["next_chunk"] == {"is_whole": True, "is_more_than_is_left": True}


def test_a_request_that_is_alone_may_take_more_than_half_of_the_pool(found: Found) -> None:
    """Its pages come with its match, and the daemon counts them as used: SGLang would look for as many again."""
    assert found["larger_than_half"] == {"is_admitted": True}


def test_pages_of_an_aborted_request_come_back_while_its_engine_rests(found: Found) -> None:
    assert found["aborted_while_idle"] == {"is_beside": False, "has_room": True}


def test_of_two_requests_in_chunks_that_wait_for_each_other_s_pages_one_begins_anew(found: Found) -> None:
    assert found["chunks_that_wait_for_each_other"] == {"gave_up": 1, "has_room": True}


def test_with_its_radix_cache_off_an_engine_finds_nothing_and_seals_nothing(found: Found) -> None:
    assert found["switched_off"] == {"others_find": 0, "it_finds": 0}


def test_random_calls_of_two_engines_find_what_was_computed_and_leave_nothing() -> None:
    """Small pools, chunks, aborts, retractions, flushes, and loads of which some fail."""
    with running_node(["--fault-copies", "0.05", "--load-limit", "8MiB"]) as node:
        seen = run("random_calls", node.socket, "2", "200")
        check_daemon(node.socket)
    assert min(seen[each] for each in ("hits", "from_host", "aborted", "retracted")) > 0


def test_random_calls_of_two_engines_find_windows_and_leave_nothing() -> None:
    """The same for layers with windows, on a pool of half as many pages: chunks wait for others to slide."""
    flags = ["--write-policy", "write_through"]  # windows that leave a device first are not saved else
    with running_node(["--fault-copies", "0.05", "--load-limit", "8MiB", *flags]) as node:
        seen = run("random_calls", node.socket, "3", "300", "windows")
        check_daemon(node.socket)
    assert min(seen[each] for each in ("hits", "from_host", "aborted", "retracted", "windows", "waiting_chunks")) > 0


def test_two_requests_of_one_name_share_nothing_but_their_name(found: Found) -> None:
    assert found["two_of_one_name"] == {"hit": 0, "are_apart": True, "found": [48, 48], "left": []}


def test_what_is_computed_across_and_after_a_change_of_weights_has_not_their_old_name(found: Found) -> None:
    """An engine of the old weights finds what was computed before, and nothing since, though nothing was flushed."""
    assert found["weights_changed"] == {"others_find": [48, 0, 0], "it_finds": [0, 48]}


def test_an_engine_whose_checkpoint_was_replaced_while_it_loaded_shares_with_no_other(found: Found) -> None:
    """The second engine's was not, and the third one's weights have the operator's own name."""
    replaced = found["replaced_while_loading"]
    assert replaced["why"] == ["files of FOLDER were replaced while they were loaded", "", ""]
    assert (replaced["others_find"], replaced["it_finds"]) == ([0, 48, 48], [48, 48, 48])


def test_an_adapter_is_what_was_loaded(found: Found) -> None:
    """Equal bytes under another number are found, other bytes under the same one are not, and old ones are again."""
    assert found["adapters"] == {"found": [48, 48, 0, 48], "unseen": [48, 0], "kept": 0}
