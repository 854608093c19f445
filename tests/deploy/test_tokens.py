"""The tokens that a cluster is given: what the script prints is what the manifests mount and the daemon reads."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from cachesvc.service.access.auth import Scope
from cachesvc.service.access.tokens import read_keys
from tests.deploy.manifests import Doc, load, of_kind, pods
from tests.deploy.test_schemas import VERSIONS
from tests.style.tree import ROOT

SCRIPT = ROOT / "deploy/k8s/tokens.sh"


def made(folder: Path, *namespaces: str) -> dict[tuple[str, str], dict[str, str]]:
    """Output of the script: the contents of each Secret by namespace and name."""
    printed = subprocess.run(
        ["sh", SCRIPT, str(folder / "operator.token"), *namespaces], capture_output=True, text=True, check=True
    )
    assert printed.stderr == ""
    documents = list(yaml.safe_load_all(printed.stdout))
    for document in documents:
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)
    return {(each["metadata"]["namespace"], each["metadata"]["name"]): each["stringData"] for each in documents}


def test_each_side_gets_its_token_and_the_daemon_digests_alone(tmp_path: Path) -> None:
    secrets = made(tmp_path, "engines", "team-b")
    file = tmp_path / "tokens.toml"
    file.write_text(secrets["cachesvc", "cachesvc-tokens"]["tokens.toml"], encoding="utf-8")
    file.chmod(0o440)
    callers = read_keys(file).callers
    operator = tmp_path / "operator.token"
    assert operator.stat().st_mode & 0o777 == 0o600
    expected: dict[str, tuple[set[Scope], str | None]] = {
        operator.read_text(encoding="utf-8").strip(): ({Scope.ADMIN}, None),
        secrets["cachesvc", "cachesvc-metrics"]["token"]: ({Scope.METRICS}, None),
        secrets["engines", "cachesvc-engine"]["token"]: ({Scope.ENGINE}, "engines"),
        secrets["team-b", "cachesvc-engine"]["token"]: ({Scope.ENGINE}, "team-b"),
    }
    assert len(expected) == len(callers) == 4
    for token, (scopes, tenant) in expected.items():
        found = callers["token", hashlib.sha256(token.encode()).hexdigest()]
        assert (set(found.scopes), found.tenant) == (scopes, tenant)
        assert token not in file.read_text(encoding="utf-8")
    assert made(tmp_path, "engines").keys() == secrets.keys() - {("team-b", "cachesvc-engine")}
    assert operator.read_text(encoding="utf-8").strip() not in expected, "another run, other tokens"


def test_without_a_namespace_it_makes_nothing(tmp_path: Path) -> None:
    ended = subprocess.run(["sh", SCRIPT, str(tmp_path / "t")], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "usage:" in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["trial", "monitored", "tls", "engine"])
def test_the_secrets_that_are_mounted_are_those_that_it_makes(name: str, tmp_path: Path) -> None:
    documents = load(name)
    secrets = made(tmp_path, "engines" if name == "engine" else "cachesvc")
    wanted = set(mounted(documents)) - {("cachesvc", "cachesvc-tls", None)}  # which cert-manager writes
    assert wanted
    for namespace, secret, key in wanted:
        assert key is None or key in secrets[namespace, secret]
        assert (namespace, secret) in secrets


def mounted(documents: list[Doc]) -> list[tuple[str, str, str | None]]:
    """Namespace, name and key (None: all) of every Secret that is asked for."""
    found: list[tuple[str, str, str | None]] = []
    for pod in pods(documents):
        for volume in pod.spec["volumes"]:
            if "secret" in volume:
                keys = [each["key"] for each in volume["secret"].get("items", ())] or [None]
                namespace = pod.owner["metadata"]["namespace"]
                found += [(namespace, volume["secret"]["secretName"], key) for key in keys]
    for monitor in of_kind(documents, "PodMonitor"):
        for end in monitor["spec"]["podMetricsEndpoints"]:
            credentials = end["authorization"]["credentials"]
            found.append((monitor["metadata"]["namespace"], credentials["name"], credentials["key"]))
    return found
