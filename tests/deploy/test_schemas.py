"""Manifests against the schemas that Kubernetes and the Prometheus operator publish, offline."""

from __future__ import annotations

import json
import shutil
import subprocess
from copy import deepcopy

import kubernetes_validate
import pytest

from tests.deploy.manifests import Doc, load, of_kind
from tests.style.tree import ROOT
from tools.k8s_render import TARGETS, digest, stale

VERSIONS = ("1.29", "1.32", "1.35")
MONITORS = ROOT / ".tools/monitors/node_modules/@kubernetes-models/prometheus-operator"
VALIDATE = """
const [folder, text] = process.argv.slice(1);
const { PodMonitor } = await import(`file://${folder}/monitoring.coreos.com/v1/PodMonitor.js`);
try { new PodMonitor(JSON.parse(text)).validate(); } catch (error) { console.log(error.message); process.exitCode = 1; }
"""


def test_what_is_rendered_is_what_the_sources_say() -> None:
    assert stale() == [], "run make k8s-render"
    assert len(digest()) == 64


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", TARGETS)
def test_manifests_fit_the_schemas(name: str, version: str) -> None:
    checked = [document for document in load(name) if document["kind"] != "PodMonitor"]
    assert checked
    for document in checked:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("spec", "template", "spec", "containers", 0, "startupProbe", "grpc", "port"), "health"),
        (("spec", "template", "spec", "hostIpc"), True),
        (("spec", "template", "spec", "terminationGracePeriodSeconds"), "60s"),
    ],
)
def test_schemas_know_bad_from_good(keys: tuple[str | int, ...], value: object) -> None:
    (document,) = of_kind(load("gpu"), "DaemonSet")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(changed(document, keys, value), VERSIONS[-1], strict=True)


@pytest.mark.skipif(not MONITORS.exists() or shutil.which("node") is None, reason="make k8s-validate brings the schema")
@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        ((), None, ""),
        (("spec", "podMetricsEndpoints", 0, "interval"), "often", "pattern"),
        (("spec", "podMetricsEndpoints", 0, "port"), 9464, "string"),
        (("spec", "selector"), None, "selector"),
    ],
)
def test_the_pod_monitor_fits_its_schema(keys: tuple[str | int, ...], value: object, said: str) -> None:
    (monitor,) = of_kind(load("monitored"), "PodMonitor")
    text = json.dumps(changed(monitor, keys, value))
    command = ["node", "--input-type=module", "-e", VALIDATE, str(MONITORS), text]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stderr
    assert (done.returncode != 0) is bool(said), done.stdout
    assert said in done.stdout


def changed(document: Doc, keys: tuple[str | int, ...], value: object) -> Doc:
    """A copy with one value set, or removed where it is None; no keys: as it was."""
    copy = deepcopy(document)
    at = copy
    for key in keys[:-1]:
        at = at[key]  # type: ignore[index]
    if keys and value is None:
        del at[keys[-1]]  # type: ignore[arg-type]
    elif keys:
        at[keys[-1]] = value  # type: ignore[index]
    return copy
