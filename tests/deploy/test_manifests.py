"""The rendered manifests hold to every rule, and every rule knows bad from good."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cachesvc.config import Config
from cachesvc.model.errors import InvalidRequest
from tests.deploy.manifests import Doc, config_of, daemon_pod, load, of_kind, pods, quantity
from tests.deploy.rules import complaints
from tools.k8s_render import TARGETS

Change = Callable[[list[Doc]], Any]


@pytest.mark.parametrize("name", TARGETS)
def test_manifests_hold_to_every_rule(name: str) -> None:
    assert complaints(load(name)) == []


def spec(documents: list[Doc]) -> Doc:
    """The daemon's pod spec."""
    pod = daemon_pod(documents)
    assert pod is not None
    return pod.spec


def daemon(documents: list[Doc]) -> Doc:
    """The daemon's container."""
    container: Doc = spec(documents)["containers"][0]
    return container


def engine(documents: list[Doc]) -> Doc:
    """The engines' pod spec."""
    return pods(of_kind(documents, "Deployment"))[0].spec


def named(documents: list[Doc], kind: str, name: str) -> Doc:
    """One document's spec."""
    return next(doc["spec"] for doc in of_kind(documents, kind) if doc["metadata"]["name"] == name)


def named_volume(pod: Doc, name: str) -> Doc:
    """One volume of a pod's spec."""
    found: Doc = next(each for each in pod["volumes"] if each["name"] == name)
    return found


def configure(old: str, new: str) -> Change:
    """A change of the daemon's settings."""

    def change(documents: list[Doc]) -> None:
        (data,) = [doc["data"] for doc in of_kind(documents, "ConfigMap")]
        assert old in data["config.toml"]
        data["config.toml"] = data["config.toml"].replace(old, new)

    return change


def rename_config(documents: list[Doc], name: str) -> None:
    """The ConfigMap under another name, on both sides."""
    named_by = next(volume for volume in spec(documents)["volumes"] if volume["name"] == "config")
    of_kind(documents, "ConfigMap")[0]["metadata"]["name"] = named_by["configMap"]["name"] = name


BREAKS: dict[str, tuple[str, Change, str]] = {
    "hostIPC": ("gpu", lambda docs: spec(docs).update(hostIPC=True), "hostIPC is on"),
    "hostPID": ("gpu", lambda docs: spec(docs).update(hostPID=True), "hostPID is on"),
    "root": ("gpu", lambda docs: spec(docs)["securityContext"].update(runAsUser=0), "may run as root"),
    "privileged": ("gpu", lambda docs: daemon(docs)["securityContext"].update(privileged=True), "is privileged"),
    "capability": (
        "gpu",
        lambda docs: daemon(docs)["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]),
        "is given ['SYS_ADMIN']",
    ),
    "kept": ("trial", lambda docs: daemon(docs)["securityContext"].pop("capabilities"), "keeps capabilities"),
    "writable": (
        "trial",
        lambda docs: daemon(docs)["securityContext"].update(readOnlyRootFilesystem=False),
        "writable root file system",
    ),
    "devices": (
        "gpu",
        lambda docs: spec(docs)["volumes"].append({"name": "d", "hostPath": {"path": "/dev"}}),
        "mounts /dev",
    ),
    "token": ("gpu", lambda docs: spec(docs).pop("automountServiceAccountToken"), "a token"),
    "role": ("gpu", lambda docs: docs.append({"kind": "ClusterRole", "metadata": {"name": "x"}}), "ClusterRole x"),
    "latest": ("gpu", lambda docs: daemon(docs).update(image="registry.example.com:5000/cachesvc"), "has no version"),
    "selector": (
        "gpu",
        lambda docs: of_kind(docs, "DaemonSet")[0]["spec"]["selector"]["matchLabels"].update(a="b"),
        "does not select its own pods",
    ),
    "budget": (
        "trial",
        lambda docs: named(docs, "PodDisruptionBudget", "engine")["selector"]["matchLabels"].update(a="b"),
        "PodDisruptionBudget engine selects no pod",
    ),
    "probe": ("gpu", lambda docs: daemon(docs)["readinessProbe"]["grpc"].update(port=7443), "readinessProbe asks"),
    "liveness": ("gpu", lambda docs: daemon(docs)["livenessProbe"]["grpc"].pop("service"), "livenessProbe asks"),
    "no health": ("gpu", configure("0.0.0.0:9465", "127.0.0.1:9465"), "probes cannot reach 127.0.0.1:9465"),
    "metrics": (
        "monitored",
        lambda docs: named(docs, "PodMonitor", "cachesvc")["podMetricsEndpoints"][0].update(port="web"),
        "PodMonitor scrapes 'web'",
    ),
    "tls port": (
        "tls",
        lambda docs: named(docs, "Service", "cachesvc")["ports"][0].update(targetPort="grpc"),
        "Service sends to 'grpc'",
    ),
    "open": (
        "tls",
        lambda docs: named(docs, "NetworkPolicy", "cachesvc-tls")["ingress"][0]["ports"].append({"port": 9464}),
        "opens [7443, 9464]",
    ),
    "anybody": (
        "tls",
        lambda docs: named(docs, "NetworkPolicy", "cachesvc-tls")["ingress"][0].pop("from"),
        "lets in whole namespaces",
    ),
    "calls out": ("gpu", lambda docs: named(docs, "NetworkPolicy", "cachesvc").update(egress=[{}]), "call out"),
    "killed": ("gpu", lambda docs: spec(docs).update(terminationGracePeriodSeconds=30), "killed after 30 s"),
    "all at once": (
        "gpu",
        lambda docs: of_kind(docs, "DaemonSet")[0]["spec"]["updateStrategy"]["rollingUpdate"].update(maxUnavailable=2),
        "updates by",
    ),
    "larger pool": ("gpu", configure('host_pool = "128GiB"', 'host_pool = "160GiB"'), "bytes of memory, and needs"),
    "larger slabs": (
        "trial",
        configure('device_pool = "256MiB"', 'device_pool = "1GiB"'),
        "bytes of memory, and needs",
    ),
    "throttled": ("gpu", lambda docs: daemon(docs)["resources"]["limits"].update(cpu="4"), "throttle"),
    "elsewhere": ("trial", configure("/run/cachesvc/cachesvc.sock", "/tmp/cachesvc.sock"), "is not in /run/cachesvc"),
    "other group": ("trial", configure('"64010"', '"7"'), "may not open the sockets"),
    "other uid": ("trial", configure(", 64011]", "]"), "uid 64011 may not map pools"),
    "no group": ("trial", lambda docs: engine(docs)["securityContext"].pop("supplementalGroups"), "may not open"),
    "replaces": (
        "trial",
        lambda docs: engine(docs)["containers"][0]["volumeMounts"][0].pop("readOnly"),
        "could replace the socket",
    ),
    "first": (
        "engine",
        lambda docs: named_volume(engine(docs), "sockets")["hostPath"].update(type="DirectoryOrCreate"),
        "would make the folder",
    ),
    "status": (
        "trial",
        lambda docs: engine(docs)["initContainers"][0].update(command=["cachesvc", "status"]),
        "runs cachesvc status, which wants a token",
    ),
    "no tokens": ("gpu", configure("tokens = ", "# tokens = "), "everybody may do everything"),
    "no secret": (
        "trial",
        lambda docs: named_volume(spec(docs), "tokens").update(secret={"secretName": "x", "defaultMode": 0o440}),
        "cachesvcd cannot read /etc/cachesvc/tokens/tokens.toml: the Secret has another key",
    ),
    "unreadable": ("gpu", lambda docs: spec(docs)["securityContext"].pop("fsGroup"), "its mode or its group"),
    "no token": (
        "trial",
        lambda docs: engine(docs)["containers"][0]["env"].pop(1),
        "engine proves nothing",
    ),
    "a wait without a token": (
        "engine",
        lambda docs: engine(docs)["initContainers"][0]["env"].pop(1),
        "await-cache proves nothing",
    ),
    "in the environment": (
        "engine",
        lambda docs: engine(docs)["containers"][0]["env"].append({"name": "CACHESVC_TOKEN", "value": "x"}),
        "has its token in the environment",
    ),
    "no secret's folder": (
        "engine",
        lambda docs: named_volume(engine(docs), "token").update(emptyDir={}, secret=None),
        "no Secret is mounted there",
    ),
    "scraped by anybody": (
        "monitored",
        lambda docs: named(docs, "PodMonitor", "cachesvc")["podMetricsEndpoints"][0].pop("authorization"),
        "PodMonitor scrapes metrics without a token",
    ),
    "no gate": ("engine", lambda docs: engine(docs).pop("initContainers"), "does not wait for the daemon"),
    "a file alone": (
        "gpu",
        lambda docs: daemon(docs)["volumeMounts"].append({"name": "x", "mountPath": "/etc/x", "subPath": "x"}),
        "is a file mounted alone",
    ),
    "digest": (
        "gpu",
        lambda docs: rename_config(docs, "cachesvc-config-7f2k9m4t8c"),
        "every change would roll the daemons",
    ),
    "claims": ("gpu", lambda docs: daemon(docs)["resources"]["limits"].update({"nvidia.com/gpu": 1}), "claims nvidia"),
    "one GPU": ("gpu", lambda docs: daemon(docs)["env"][0].update(value="0"), "does not see every GPU"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_rules_know_bad_from_good(name: str) -> None:
    target, change, said = BREAKS[name]
    documents = load(target)
    change(documents)
    assert any(said in complaint for complaint in complaints(documents)), complaints(documents)


@pytest.mark.parametrize("name", ["gpu", "trial", "tls", "monitored"])
def test_a_daemon_reads_what_it_is_given(name: str, tmp_path: Path) -> None:
    documents = load(name)
    pod = daemon_pod(documents)
    assert pod is not None
    config = config_of(documents, pod, tmp_path)
    assert config.backend == ("shm" if name == "trial" else "cuda")
    assert bool(config.tls_key) is (name == "tls")
    daemon(documents)["args"].append("--no-such-flag")
    with pytest.raises(SystemExit):
        config_of(documents, pod, tmp_path)
    daemon(documents)["args"].pop()
    configure("socket_group", "socket_grop")(documents)
    with pytest.raises(InvalidRequest, match="unknown key 'socket_grop'"):
        config_of(documents, pod, tmp_path)


@pytest.mark.parametrize(
    ("setting", "name", "value"),
    [
        ("metrics_listen", "monitored", "0.0.0.0:9464"),
        ("tls_client_ca", "tls", "/etc/cachesvc/tls/ca.crt"),
    ],
)
def test_what_a_component_is_for_is_on(setting: str, name: str, value: str, tmp_path: Path) -> None:
    if setting not in {field.name for field in fields(Config)}:
        pytest.skip(f"this daemon has no setting {setting}")
    documents = load(name)
    pod = daemon_pod(documents)
    assert pod is not None
    assert getattr(config_of(documents, pod, tmp_path), setting) == value


def test_the_certificate_lies_where_the_daemon_looks() -> None:
    documents = load("tls")
    flags = dict(argument.split("=", 1) for argument in daemon(documents)["args"])
    mount = next(mount for mount in daemon(documents)["volumeMounts"] if mount["name"] == "tls")
    volume = next(volume for volume in spec(documents)["volumes"] if volume["name"] == "tls")
    assert {flags["--tls-certificate"], flags["--tls-key"]} == {
        f"{mount['mountPath']}/tls.{end}" for end in ("crt", "key")
    }
    assert volume["secret"] == {"secretName": "cachesvc-tls", "defaultMode": 0o440}
    assert spec(documents)["securityContext"]["fsGroup"] == spec(documents)["securityContext"]["runAsGroup"]


def test_engines_have_room_for_pages_that_they_touch_first(tmp_path: Path) -> None:
    """A page of a shared pool counts against the pod that touches it first, and engines do."""
    documents = load("trial")
    pod = daemon_pod(documents)
    assert pod is not None
    pool = config_of(documents, pod, tmp_path).device_pool
    resources = engine(documents)["containers"][0]["resources"]
    assert quantity(resources["limits"]["memory"]) >= quantity(resources["requests"]["memory"]) + pool
