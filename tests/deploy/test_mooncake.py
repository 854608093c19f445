"""The manifests of a Mooncake Store: confined like the daemon's, and every flag said that the daemon relies on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from cachesvc.storage.mooncake.native import MooncakeOptions
from tests.deploy.manifests import Doc, of_kind, pods
from tests.deploy.rules import confined, pinned, powerless

FOLDER = Path(__file__).resolve().parents[2] / "deploy/mooncake"
EXTRAS = Path(__file__).resolve().parents[2] / "pyproject.toml"


@pytest.fixture
def documents() -> list[Doc]:
    named = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    return [each for name in named for each in yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8"))]


def test_nobody_has_more_than_is_needed(documents: list[Doc]) -> None:
    own = [each for each in documents if each["kind"] != "ServiceAccount"]
    assert [*confined(own), *powerless(own), *pinned(own)] == []


def test_selectors_select(documents: list[Doc]) -> None:
    labels = [pod.labels for pod in pods(documents)]
    for service in of_kind(documents, "Service"):
        assert any(service["spec"]["selector"].items() <= each.items() for each in labels)
    for owner in of_kind(documents, "Deployment"):
        wanted = owner["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= owner["spec"]["template"]["metadata"]["labels"].items()


def test_the_flags_are_those_that_the_daemon_relies_on(documents: list[Doc]) -> None:
    (master,) = (pod for pod in pods(documents) if pod.owner["metadata"]["name"] == "mooncake-master")
    flags = dict(re.findall(r"-(\w+)=(\S+)", " ".join(master.containers[0]["command"])))
    assert float(flags["put_start_discard_timeout_sec"]) == MooncakeOptions("").discard
    assert int(flags["put_start_release_timeout_sec"]) == 600
    assert {"rpc_port", "default_kv_lease_ttl", "client_ttl", "eviction_high_watermark_ratio"} <= flags.keys()


def test_nobody_gets_in_but_who_is_named(documents: list[Doc]) -> None:
    (policy,) = of_kind(documents, "NetworkPolicy")
    for rule in policy["spec"]["ingress"]:
        assert all("podSelector" in each for each in rule["from"])
    assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}


def test_the_image_has_the_version_of_the_extra() -> None:
    said = re.search(r"mooncake-transfer-engine-non-cuda==\S+?(?=[\"\s])", EXTRAS.read_text(encoding="utf-8"))
    assert said is not None
    assert said[0] in (FOLDER / "Dockerfile").read_text(encoding="utf-8")
