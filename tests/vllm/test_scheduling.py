"""vLLM's scheduler on the daemon's pages, thousands of steps a second: each token's page is looked at when it is read,
nothing is kept of requests that have ended, and whatever happens, requests end."""

from __future__ import annotations

import signal
from contextlib import ExitStack, suppress

import pytest
from cachesvc_client import CacheClient, PoolExhausted
from kvcache.v1 import admin_pb2

from tests.e2e.rig import Node, running_node, short_folder, wait_until
from tests.forked_process import PipedProcess
from tests.long_cases import long
from tests.vllm.harness import daemon_faults, run_module
from tests.vllm.shape import FULL, STATE, WINDOW, Shape

ALL_KINDS = Shape(groups=(STATE, WINDOW, FULL), pages=200)
LARGE_PAGES = ("--device-pool", "1GiB", "--host-pool", "2GiB")


def run(name: str, node: Node, seed: int, module: str = "scheduling_runs") -> dict[str, int]:
    """Return the counts of a run. The daemon suffers what the run asks for."""
    faults = {
        **daemon_faults(node.daemon.kill, node.daemon.start),
        "@pause": lambda _: node.daemon.process.send_signal(signal.SIGSTOP),
        "@resume": lambda _: node.daemon.process.send_signal(signal.SIGCONT),
        "@announce": lambda _, version: announce(node, version),
        "@stop": lambda process: stop(process, node, ALL_KINDS if name.endswith("all-kinds") else Shape()),
    }
    return run_module(f"tests.vllm.{module}", name, node.socket, str(seed), faults=faults)


def announce(node: Node, version: str) -> None:
    """Name the weights that engines load next."""
    (model,) = node.admin.ListModels(admin_pb2.ListModelsRequest()).models
    node.admin.SetWeightsVersion(admin_pb2.SetWeightsVersionRequest(model_id=model.model_id, version=version))


def stop(process: PipedProcess, node: Node, shape: Shape) -> None:
    """Stop an engine until its lease is lost and its hits are others', and let it go on."""
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: "live" not in node.lease_states().values(), "the silent lease is lost")
    with CacheClient(node.socket) as client:
        pages = (shape.pages,) * len(shape.groups)
        registration = client.register("m", shape.layout, device_pages=pages, reserved_pages=1)
        assert registration.device_pages == pages
        with (
            client.open_lease(registration) as lease,
            lease.attach() as pool,
            suppress(PoolExhausted),
            ExitStack() as all_,
        ):
            while True:
                sequence = all_.enter_context(lease.match(b""))
                sequence.allocate(1)
                for group, table in zip(shape.layout.groups, sequence.tables, strict=True):
                    pool.page(group.name, int(table[0]))[0, "kv"][:] = 0xFF
    process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "async", "drafts", long("lookahead"), long("late"), long("drop"), "resets"),
        *(long("stages"), "stages-async", long("resets-stages")),
    ],
)
def test_each_page_holds_what_was_computed_and_nothing_is_kept(name: str) -> None:
    with running_node() as node:
        told = run(name, node, 1)
        assert min(told["loads"], told["preempted"], told["again"]) >= 10, "what is admitted again is counted apart"
        assert told["failed_loads"] == 0
        assert (told["copies"] > 0) == (name not in ("lookahead", "late", "drop")), "of last blocks"


@pytest.mark.parametrize(
    "name",
    [
        *("windows-late", "sizes-async", long("scratch")),
        *("states-async", long("states-within"), long("states-priorities"), "all-kinds"),
        *("stages-all-kinds", long("stages-windows")),
        *(long("states-drafts"), "states-late", long("states-drop"), long("saved-late"), long("all-kinds-late")),
    ],
)
def test_each_group_holds_what_was_computed(name: str) -> None:
    """Windows from their beginning, states of exactly the tokens before, and blocks of several sizes."""
    with running_node() as node:
        told = run(name, node, 1)
        assert min(told["whole"], told["loads"], told["preempted"]) > 0
        assert told["failed_loads"] == 0


@pytest.mark.parametrize(
    "name",
    [
        *("windows-alone", "states-alone-async", long("states-alone"), long("states-alone-drafts")),
        *(long("windows-alone-drafts"), long("tight-windows-alone")),
    ],
)
def test_engines_that_keep_no_whole_sequence_find_the_last_window_or_state(name: str) -> None:
    """Markers lead their blocks, which vLLM does not know. Their own pool is never short, so under ``write_back`` a
    window that leaves the device would be lost."""
    with running_node(["--write-policy", "write_through"]) as node:
        assert min(run(name, node, 1)[each] for each in ("whole", "loads")) > 100


@pytest.mark.parametrize(
    "name", ["repeated", "repeated-async", "repeated-drafts", "repeated-lookahead", long("repeated-stages")]
)
def test_a_prompt_that_comes_again_has_as_many_tokens_as_in_vllm_alone(name: str) -> None:
    with running_node() as node:
        assert run(name, node, 1)["whole"] == 4 * 27


@pytest.mark.parametrize(
    "name",
    ["together", "together-async", "together-windows", "together-late", "together-drop", long("together-stages")],
)
def test_what_requests_that_come_together_begin_with_is_computed_once(name: str) -> None:
    with running_node() as node:
        assert run(name, node, 1)["whole"] == 4 * 6 + 2


def test_a_request_that_waits_for_a_place_is_matched_again_once() -> None:
    with running_node() as node:
        assert run("queued", node, 1)["whole"] == 6


@pytest.mark.parametrize("name", ["parting", "parting-async"])
def test_a_prompt_that_parts_from_another_leaves_a_state_there(name: str) -> None:
    with running_node() as node:
        assert run(name, node, 1)["whole"] == 9


@pytest.mark.parametrize("name", ["aborted", "aborted-states", "aborted-windows", "aborted-stages"])
def test_what_a_step_writes_is_kept_until_its_output_whoever_frees_it(name: str) -> None:
    with running_node() as node:
        assert run(name, node, 1)["whole"] == 5


@pytest.mark.parametrize(
    ("name", "least"), [("plain", 10), long("async", 10), ("failing", 10), ("all-kinds", 1), ("stages-async", 10)]
)
def test_requests_whose_loads_fail_are_computed_or_end_as_vllm_is_told(name: str, least: int) -> None:
    """Requests of all kinds of groups load seldom: their longest hits are in place."""
    with running_node(["--fault-copies", "0.2"]) as node:
        assert run(name, node, 2)["failed_loads"] >= least


@pytest.mark.parametrize(
    "name",
    [
        *("tight", long("tight-async"), long("tight-stages"), long("tight-lookahead"), long("tight-late")),
        *("tight-all-kinds", long("tight-states-late")),
    ],
)
def test_engines_that_have_each_what_the_others_wait_for_go_on(name: str) -> None:
    with running_node() as node:
        assert run(name, node, 1)["whole"] == 200


def test_an_engine_whose_daemon_dies_while_requests_are_loaded_goes_on_with_the_next() -> None:
    with short_folder() as folder, running_node(LARGE_PAGES, folder=folder) as node:
        assert run("die-while-loading", node, 1)["failed_loads"] >= 1


@pytest.mark.parametrize(
    "name",
    [
        *("deaths", long("deaths-async"), "deaths-all-kinds", long("deaths-states-drafts")),
        *("deaths-windows-alone", long("deaths-states-alone"), "deaths-stages"),
    ],
)
def test_requests_end_well_however_often_the_daemon_dies(name: str) -> None:
    with short_folder() as folder, running_node(folder=folder) as node:
        assert run(name, node, 1)["whole"] >= 50


def test_blocks_that_another_connector_could_not_load_do_not_end_the_engine() -> None:
    with running_node() as node:
        assert run("sibling", node, 1)["whole"] == 1


@pytest.mark.parametrize(
    "name",
    [
        *("full-now", "full-late", "windows-late", long("windows-now")),
        *(long("windows-alone-now"), long("windows-alone-late"), long("states-now"), long("states-late")),
    ],
)
def test_what_another_connector_has_loaded_is_right_for_all_engines(name: str) -> None:
    """Models with windows or states share none of it: vLLM has no pages of what lies before these."""
    with running_node() as node:
        assert run(name, node, 1, "sibling_runs")["whole"] == 5


def test_a_load_of_another_connector_that_has_not_come_is_shared_with_none() -> None:
    with running_node() as node:
        assert run("aborted", node, 1, "sibling_runs")["whole"] == 1


def test_one_token_is_computed_of_a_prompt_that_is_a_hit_and_no_other_request_gets_its_copy() -> None:
    with running_node(LARGE_PAGES) as node:
        assert run("whole", node, 1, "whole_hits")["copies"] >= 4


@pytest.mark.parametrize("name", ["lone", "lone-async"])
def test_a_step_whose_load_fails_is_dropped_with_the_one_behind_it_and_its_request_computed(name: str) -> None:
    with running_node(["--fault-copies", "0.2"]) as node:
        told = run(name, node, 1, "whole_hits")
        assert told["early"] >= 20
        assert told["failed_loads"] >= 2


def test_requests_that_use_what_a_dropped_step_was_to_load_begin_anew_with_it() -> None:
    """Two steps are under way, and the second one has such a request."""
    with running_node() as node:
        assert run("unsound", node, 1, "whole_hits")["preempted"] > 8


@pytest.mark.parametrize("name", ["adapters", "adapters-async", "adapters-stages"])
def test_adapters_are_what_is_loaded_also_where_that_changes_under_a_request(name: str) -> None:
    with running_node() as node:
        assert run(name, node, 1)["whole"] == 9


def test_sixteen_requests_an_iteration_wait_for_no_answer_and_a_first_token_for_no_report() -> None:
    """The pool is full."""
    with running_node() as node:
        assert run("admissions", node, 1, "admission_runs")["whole"] == 200 + 16 * 32 + 2


def test_a_burst_at_an_idle_engine_is_admitted_in_one_iteration() -> None:
    with running_node() as node:
        assert run("burst", node, 1, "admission_runs")["whole"] == 4 * 72


def test_the_last_token_of_an_engine_waits_for_no_answer_of_the_daemon() -> None:
    with running_node() as node:
        assert run("last-token", node, 1, "admission_runs")["whole"] == 3


def test_the_stock_of_an_engine_that_runs_nothing_goes_back_to_the_others() -> None:
    with running_node() as node:
        assert run("four", node, 1, "admission_runs")["whole"] == 4 * 12 + 150


def test_engines_share_within_an_announced_version_of_weights_and_never_across() -> None:
    with short_folder() as folder, running_node(folder=folder) as node:
        assert run("weights", node, 1)["failed_loads"] == 0


@pytest.mark.parametrize(
    ("name", "whole"), [("stopped", 24), long("stopped-async", 0), ("stopped-all-kinds", 0), long("stopped-stages", 0)]
)
def test_no_token_comes_of_pages_that_became_others_while_an_engine_was_stopped(name: str, whole: int) -> None:
    with running_node(["--lease-seconds", "2"]) as node:
        assert run(name, node, 1)["whole"] == whole
