"""A running daemon's metrics: their values under a known load, no tenant's data in them, and access to them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cachesvc_client import EventSubscriber, NotFound, PermissionDenied
from cachesvc_client.core.errors import error_of
from cachesvc_ctl.core.daemon_process import DaemonFailed

from cachesvc.telemetry.catalogue import CATALOGUE
from tests.e2e.engine import BLOCK_TOKENS, PLAIN, WINDOWED, Engine, prompt
from tests.e2e.rig import FLAGS, Node, running_node, short_folder, wait_until
from tests.e2e.scraping import LISTEN, address, page_text, ready_line, running_prometheus, scrape, total
from tests.forked_daemon import ForkedDaemon
from tests.style.test_telemetry import GRAFANA, panels, rules

PAGE_BYTES = PLAIN.page_bytes(0)


@pytest.fixture
def scraped() -> Iterator[Node]:
    """A daemon with a page."""
    with short_folder() as folder:
        storage = f"file:{folder}/cache?capacity=64MiB&floor=0&write=never"
        with running_node([*LISTEN, "--eviction", "hazard", "--storage", storage]) as node:  # it is compared with lru
            yield node


def settle(node: Node) -> None:
    """Wait until nothing is being copied."""
    wait_until(lambda: node.pages("in_flight") == 0, "transfers have ended")


def load(node: Node, engine: Engine) -> None:
    """Prompts that are computed, evicted to a small host, partly lost, hit on both tiers and computed again."""
    for seed in (0, 1, 2, 3, 0, 1, 3, 3):
        engine.serve(prompt(seed, 4))
        settle(node)


def test_the_page_tells_a_known_load(scraped: Node) -> None:
    with Engine(scraped.socket, device_pages=8, host_pages=8) as engine:
        load(scraped, engine)
        with engine.lease.match(engine.keys(prompt(3, 4))) as sequence:
            sequence.allocate(6)
            page = scrape(scraped)
        tokens = {
            name: total(page, f"{name}_tokens_total") for name in ("requested", "hit", "ceiling", "computed", "missed")
        }
        assert tokens["requested"] == 9 * 4 * BLOCK_TOKENS == tokens["hit"] + tokens["missed"]
        assert tokens["ceiling"] == 5 * 4 * BLOCK_TOKENS
        assert total(page, "missed_tokens_total", reason="new") == 4 * 4 * BLOCK_TOKENS
        lost = total(page, "missed_tokens_total", reason="evicted")
        assert lost == tokens["ceiling"] - tokens["hit"] == total(page, "recomputed_tokens_total", reason="evicted") > 0
        assert tokens["computed"] == tokens["missed"]
        assert total(page, "hit_tokens_total", tier="device") >= 2 * 4 * BLOCK_TOKENS
        for state, count in (("private", 2), ("sealed", 6), ("quarantined", 0)):
            assert total(page, "pages", tier="device", state=state) == count
        assert total(page, "pinned_blocks", tier="device") == 4
        assert total(page, "sequences") == 1
        assert total(page, "leases", state="live") == 1
        stored = total(page, "transfer_bytes_total", direction="d2h", device="shm-0")
        assert stored == scraped.counters()["d2h_bytes"] > 0
        assert total(page, "transfer_seconds_count", direction="d2h") > 0
        assert total(page, "dropped_unused_bytes_total", tier="host") % PAGE_BYTES == 0
        assert (
            total(page, "eviction_age_seconds_count", tier="host")
            == total(page, "dropped_blocks_total", tier="host")
            > 0
        )


def test_every_metric_of_the_catalogue_is_on_the_page(scraped: Node) -> None:
    with Engine(scraped.socket, device_pages=8, host_pages=8) as engine:
        load(scraped, engine)
        with engine.lease.step() as stream:
            batch = stream.batch()
            batch.prefetch(b"")
            stream.submit(batch)
        text, page = page_text(scraped), scrape(scraped)
    families = {name for name in re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE) if name.startswith("cachesvc_")}
    assert families == {metric.exported for metric in CATALOGUE.values()}
    named = {name for name, _ in page}
    silent = [m.name for m in CATALOGUE.values() if not named & {m.exported, f"{m.exported}_count"}]
    assert silent == ["lost_hit_tokens"], "every one has a value under such a load, but those of windows and states"


def test_who_follows_events_is_a_gauge_and_no_counter(scraped: Node) -> None:
    with Engine(scraped.socket, device_pages=8) as engine:
        with EventSubscriber(scraped.socket, engine.registration.namespace) as subscriber:
            stream = subscriber.subscribe()
            next(stream)
            page = scrape(scraped)
            assert total(page, "event_subscribers") == 1
            assert not [labels for _, labels in page if ("event", "event_subscribers") in labels]
        wait_until(lambda: total(scrape(scraped), "event_subscribers") == 0, "those who left are forgotten")


def test_no_label_tells_one_tenant_of_another(scraped: Node) -> None:
    salts = (b"tenant-one-secret", b"tenant-two-secret")
    with Engine(scraped.socket, name="engine-one", salt=salts[0], device_pages=8, host_pages=8) as one:
        load(scraped, one)
        before = scrape(scraped)
        with Engine(scraped.socket, name="engine-two", salt=salts[1], device_pages=8, host_pages=8) as two:
            load(scraped, two)
            after, text = scrape(scraped), page_text(scraped)
            namespaces = [engine.registration.namespace for engine in (one, two)]
            keys = [engine.keys(prompt(0, 4)) for engine in (one, two)]
            ids = [engine.lease.id for engine in (one, two)]
    first = {series: value for series, value in before.items() if ("model_id", "1") in series[1]}
    assert len(first) > 50
    assert {series: after[series] for series in first} == first, "what one tenant does shows in its own series alone"
    own = {
        (name, labels - {("model_id", "2")}): v for (name, labels), v in after.items() if ("model_id", "2") in labels
    }
    mine = {(name, labels - {("model_id", "1")}): v for (name, labels), v in first.items()}
    exact = [series for series in mine if "seconds" not in series[0]]
    assert [own[series] for series in exact] == [mine[series] for series in exact], "the same prompts, found anew"
    secret = [*ids, "engine-one", "engine-two", *(salt.decode() for salt in salts)]
    secret += [value[at : at + 4].hex() for value in (*namespaces, *keys) for at in range(0, 32, 4)]
    assert [word for word in secret if word in text] == []


def test_errors_are_counted_by_what_the_caller_was_told(scraped: Node) -> None:
    with Engine(scraped.socket, device_pages=8) as engine:
        sequence = engine.lease.match(b"")
        sequence.release()
        with engine.lease.step() as stream:
            batch = stream.batch()
            batch.prefetch(b"ragged")
            [refused] = stream.submit(batch)
        assert isinstance(refused, Exception)
        with pytest.raises(NotFound):
            engine.client.open_lease(replace(engine.registration, model_id=99))
        page = scrape(scraped)
    assert total(page, "step_operations_total", operation="prefetch", code="INVALID") == 1
    assert total(page, "rpc_calls_total", method="LeaseService/Open", code="NOT_FOUND") == 1
    assert total(page, "rpc_calls_total", method="CacheService/Step", code="OK") >= 1
    assert total(page, "rpc_seconds_count", method="CacheService/Step") >= 1
    assert total(page, "rpc_calls_total", code="INTERNAL") == 0


def test_who_is_refused_at_the_door_is_counted_and_names_no_series() -> None:
    with running_node([*LISTEN, "--listen", "127.0.0.1:0"]) as node:
        with grpc.insecure_channel(f"127.0.0.1:{ready_line(node)['port']}") as loopback:
            for method in ("kvcache.v1.AdminService/Drain", "kvcache.v1.AdminService/Guess", "guess.Guess/Guess"):
                call: Any = loopback.unary_unary(f"/{method}")
                with pytest.raises(grpc.RpcError) as refused:
                    call(b"")
                assert isinstance(error_of(refused.value), PermissionDenied)
        page, text = scrape(node), page_text(node)
    assert total(page, "rpc_calls_total", method="AdminService/Drain", code="PERMISSION_DENIED") == 1
    assert total(page, "rpc_calls_total", method="other", code="PERMISSION_DENIED") == 2
    assert "Guess" not in text


def test_many_scrapers_and_a_load_do_not_disturb_each_other(scraped: Node) -> None:
    done = threading.Event()

    def watch() -> list[float]:
        seen: list[float] = []
        while not done.is_set():
            seen.append(total(scrape(scraped), "requested_tokens_total"))
        return seen

    with ThreadPoolExecutor(4) as pool, Engine(scraped.socket, device_pages=8, host_pages=8) as engine:
        watchers = [pool.submit(watch) for _ in range(4)]
        try:
            for _ in range(4):
                load(scraped, engine)
        finally:
            done.set()
        for watcher in watchers:
            seen = watcher.result()
            assert seen == sorted(seen)


def test_an_address_in_use_is_said(scraped: Node, folder: Path) -> None:
    with pytest.raises(DaemonFailed, match="cannot serve metrics on"):
        ForkedDaemon([*FLAGS, "--metrics-listen", address(scraped)], folder=str(folder)).start()


@pytest.mark.parametrize(
    ("flags", "module", "extra"),
    [
        (LISTEN, "prometheus_client", "prometheus"),
        (("--otlp-endpoint", "http://127.0.0.1:9"), "opentelemetry.sdk", "otel"),
    ],
)
def test_a_missing_extra_is_said(folder: Path, flags: tuple[str, ...], module: str, extra: str) -> None:
    script = f"import sys; sys.modules[{module!r}] = None; from cachesvc.__main__ import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", script, "--socket", str(folder / "s"), *FLAGS, *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert f"install cachesvc[{extra}]" in ended.stderr


def test_a_real_prometheus_draws_every_panel_and_takes_every_rule(scraped: Node) -> None:
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    variables = {"$model": ".*", "$node": ".*", "$job": "cachesvc", "$__rate_interval": "1m"}
    expressions = [target["expr"] for panel in panels() for target in panel["targets"]]
    for name, value in variables.items():
        expressions = [expression.replace(name, value) for expression in expressions]
    with (
        short_folder() as folder,
        Engine(scraped.socket, device_pages=8, host_pages=8) as engine,
        Engine(scraped.socket, model="windowed@1", layout=WINDOWED) as windowed,
        running_prometheus(binary, folder, address(scraped), GRAFANA / "alerts.yaml") as prometheus,
    ):

        def work() -> None:
            load(scraped, engine)
            windowed.serve(prompt(1, 4))
            with engine.lease.step() as stream:
                batch = stream.batch()
                batch.match(engine.keys(prompt(3, 4)))
                [sequence] = stream.submit(batch)
            sequence.release()
            with pytest.raises(NotFound):
                engine.client.open_lease(replace(engine.registration, model_id=99))

        def missing() -> list[str]:
            return [expression for expression in expressions if not prometheus.series(expression)]

        def is_drawn() -> bool:
            work()
            return not missing()

        wait_until(is_drawn, "every panel has data")
        assert prometheus.series('up{job="cachesvc"}')[0]["value"][1] == "1"
        expected = total(scrape(scraped), "requested_tokens_total")
        wait_until(
            lambda: float(prometheus.series("sum(cachesvc_requested_tokens_total)")[0]["value"][1]) == expected,
            "Prometheus has read the same number",
        )
        for rule in rules():
            prometheus.series(rule["expr"])
        [group] = prometheus.ask("rules")["groups"]
        wait_until(lambda: {r["health"] for r in prometheus.ask("rules")["groups"][0]["rules"]} == {"ok"}, "rules ran")
        assert {rule["name"] for rule in group["rules"]} == {rule["alert"] for rule in rules()}
