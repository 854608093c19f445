"""SGLang engines on a small pool: hits come from the host, requests are retracted, each answer is SGLang's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, multiprocess

from tests.e2e.rig import running_node
from tests.sglang.rig import SglangFleet
from tests.vllm.long_cases import long
from tests.vllm.rig import BLOCK_TOKENS, Engine, engines, random_prompt, random_requests

SMALL_BLOCKS = 48
ROUNDS = 12
HASTY = {"schedule_conservativeness": 0.05}
"""SGLang admits as if answers were short, and retracts when they are not."""


SLOW_LOADS = ("--load-limit", "4MiB", "--lease-seconds", "600")
"""A load takes longer than SGLang does to launch a step, and no lease is lost to a busy machine."""

EVICTED = [random_prompt(200 + each, 12.5) for each in range(6)]
"""Prompts that drive each other from the device."""


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the values of an engine's metrics."""
    return tmp_path_factory.mktemp("values")


@pytest.fixture(scope="module")
def small(fleet: SglangFleet, values: Path) -> Iterator[list[Engine]]:
    """Two engines on one small pool: one that overlaps scheduling and computing, and one that does not."""
    folder = {"PROMETHEUS_MULTIPROC_DIR": str(values)}
    with (
        running_node(SLOW_LOADS) as node,
        engines(
            fleet.engine(node.socket, SMALL_BLOCKS, options={**HASTY, "enable_metrics": True}, variables=folder),
            fleet.engine(node.socket, SMALL_BLOCKS, options={**HASTY, "disable_overlap_schedule": True}),
        ) as running,
    ):
        yield list(running)


def test_a_prefix_that_was_evicted_comes_from_the_host(small: list[Engine], plain: Engine) -> None:
    """Nothing else runs: each layer waits for its own part."""
    expected = [plain.ask(prompt)[0].said for prompt in EVICTED]
    assert [small[0].ask(prompt)[0].said for prompt in EVICTED] == expected
    for engine in small:
        answers = [engine.ask(prompt)[0] for prompt in EVICTED]
        assert [answer.said for answer in answers] == expected
        assert [answer.cached for answer in answers] == [12 * BLOCK_TOKENS] * len(EVICTED)


def test_metrics_have_hits_by_tier_and_loads(small: list[Engine], plain: Engine, values: Path) -> None:
    expected = [plain.ask(prompt)[0].said for prompt in EVICTED]
    before = read_metrics(values)
    assert [small[0].ask(prompt)[0].said for prompt in EVICTED] == expected
    more = read_metrics(values) - before
    tokens = 12 * BLOCK_TOKENS * len(EVICTED)
    assert more["sglang:cached_tokens_total", "device"] + more["sglang:cached_tokens_total", "host"] == tokens
    assert more["sglang:load_back_tokens_total", "kv"] == more["sglang:cached_tokens_total", "host"] > 0
    assert more["sglang:cachesvc_loads_total", "came"] == more["sglang:load_back_duration_seconds_count", ""] > 0
    assert more["sglang:load_back_bytes_total", ""] > 0
    assert not more["sglang:cachesvc_loads_total", "failed"]
    assert read_metrics(values)["sglang:cachesvc_shares", ""] == 1


def read_metrics(folder: Path) -> Counter[tuple[str, str]]:
    """Samples by name, and by the label that is theirs alone."""
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(folder))  # type: ignore[no-untyped-call]
    own = ("cache_source", "pool", "outcome")
    found: Counter[tuple[str, str]] = Counter()
    for sample in (sample for metric in registry.collect() for sample in metric.samples):
        if sample.name.startswith(("sglang:cache", "sglang:load_back")):
            label = next((sample.labels[name] for name in own if name in sample.labels), "")
            found[sample.name, label] += int(sample.value)
    return found


def test_prefixes_of_several_requests_come_from_the_host(small: list[Engine], plain: Engine) -> None:
    """The first one is computed on at once, and others wait beside it for all of theirs."""
    expected = [answer.said for answer in plain.ask(*EVICTED)]
    for engine in small:
        answers = engine.ask(*EVICTED)
        assert [answer.said for answer in answers] == expected
        assert [answer.cached for answer in answers] == [12 * BLOCK_TOKENS] * len(EVICTED)


@pytest.mark.parametrize("is_overlapping", [True, long(False)])
def test_a_step_whose_load_fails_says_nothing_and_its_request_is_computed(
    fleet: SglangFleet, plain: Engine, tmp_path: Path, is_overlapping: bool
) -> None:
    log = tmp_path / "log"
    options = {"disable_overlap_schedule": not is_overlapping, "log_level": "warning"}
    expected = [plain.ask(prompt)[0].said for prompt in EVICTED]
    with (
        running_node([*SLOW_LOADS, "--load-limit", "1MiB", "--fault-copies", "0.3"]) as node,
        engines(fleet.engine(node.socket, SMALL_BLOCKS, log=str(log), options=options)) as (engine,),
    ):
        for _ in range(ROUNDS):
            assert [engine.ask(prompt)[0].said for prompt in EVICTED] == expected
            if log.exists() and "step_void" in log.read_text(encoding="utf-8"):
                break
        else:
            pytest.fail("no load has failed that a step was launched on")
        assert [answer.said for answer in engine.ask(*EVICTED)] == expected


def test_engines_that_want_more_than_there_is_retract_and_answer_alike(small: list[Engine], plain: Engine) -> None:
    requests = [random_prompt(300 + each, 2.5, new=150) for each in range(16)]
    expected = [answer.said for answer in plain.ask(*requests)]
    for engine, mine in zip(small, (requests[:8], requests[8:]), strict=True):
        engine.send(*mine)
    answers = [answer.said for engine in small for answer in engine.collect()]
    assert answers == expected


def test_random_requests_on_a_small_pool_are_answered_alike(small: list[Engine], plain: Engine) -> None:
    requests = random_requests(11, 48)
    expected = [answer.said for answer in plain.ask(*requests)]
    for engine, mine in zip(small, (requests[:24], requests[24:]), strict=True):
        engine.send(*mine)
    assert [answer.said for engine in small for answer in engine.collect()] == expected
