"""A daemon's page of metrics, and a real Prometheus that scrapes it."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.rig import Node, wait_until

LISTEN = ("--metrics-listen", "127.0.0.1:0")
Labels = frozenset[tuple[str, str]]
Page = dict[tuple[str, Labels], float]


def ready_line(node: Node) -> dict[str, Any]:
    """The daemon's message that it is ready."""
    lines = [json.loads(line) for line in node.log().splitlines()]
    return next(line for line in lines if line["event"] == "ready")


def address(node: Node) -> str:
    """HOST:PORT of the daemon's page."""
    return f"127.0.0.1:{ready_line(node)['metrics_port']}"


def page_text(node: Node) -> str:
    """The page of metrics."""
    with urllib.request.urlopen(f"http://{address(node)}/metrics") as page:
        text: str = page.read().decode()
    return text


def scrape(node: Node) -> Page:
    """Every sample of the page by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page_text(node))
        for sample in family.samples
    }


def total(page: Page, name: str, **labels: str) -> float:
    """Sum of a daemon's series that have these labels."""
    wanted = labels.items()
    return sum(
        value for (other, has), value in page.items() if other == f"cachesvc_{name}" and wanted <= dict(has).items()
    )


class Prometheus:
    """A server of one's own."""

    def __init__(self, at: str) -> None:
        self._at = at

    def ask(self, path: str, **query: str) -> Any:
        """The data of an API answer. Raises urllib's HTTPError for a query that Prometheus refuses."""
        with urllib.request.urlopen(f"http://{self._at}/api/v1/{path}?{urllib.parse.urlencode(query)}") as answer:
            return json.load(answer)["data"]

    def series(self, expression: str) -> list[dict[str, Any]]:
        """Series of an expression now."""
        result: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return result

    def is_up(self) -> bool:
        """True once the server answers."""
        try:
            self.series("1")
        except OSError:
            return False
        return True


@contextmanager
def running_prometheus(binary: str, folder: Path, target: str, rules: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes ``target`` every second as the job ``cachesvc``, with rules."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        at = f"127.0.0.1:{probe.getsockname()[1]}"
    config = folder / "prometheus.yml"
    config.write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(rules)],
                "scrape_configs": [{"job_name": "cachesvc", "static_configs": [{"targets": [target]}]}],
            }
        )
    )
    command = [
        binary,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={at}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    server = Prometheus(at)
    try:
        wait_until(lambda: process.poll() is not None or server.is_up(), "Prometheus serves")
        assert process.poll() is None, (folder / "prometheus.log").read_text()
        yield server
    finally:
        process.terminate()
        process.wait()
