"""The rendered manifests hold to every rule, and every rule knows bad from good."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cachesvc.config import Config
from cachesvc.model.errors import InvalidRequest
from tests.deploy.manifests import Doc, config_of, daemon_pod, load, of_kind, pods, quantity
from tests.deploy.rules import complaints
from tools.k8s_render import TARGETS


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


def configure(documents: list[Doc], old: str, new: str) -> None:
    """Change the daemon's settings."""
    (data,) = [doc["data"] for doc in of_kind(documents, "ConfigMap")]
    assert old in data["config.toml"]
    data["config.toml"] = data["config.toml"].replace(old, new)


def rename_config(documents: list[Doc], name: str) -> None:
    """The ConfigMap under another name, on both sides."""
    named_by = next(volume for volume in spec(documents)["volumes"] if volume["name"] == "config")
    of_kind(documents, "ConfigMap")[0]["metadata"]["name"] = named_by["configMap"]["name"] = name


BREAKS = (
    ("gpu", "spec.update(hostIPC=True)", "hostIPC is on"),
    ("gpu", "spec.update(hostPID=True)", "hostPID is on"),
    ("gpu", "spec['securityContext'].update(runAsUser=0)", "may run as root"),
    ("gpu", "daemon['securityContext'].update(privileged=True)", "is privileged"),
    ("gpu", "daemon['securityContext']['capabilities'].update(add=['SYS_ADMIN'])", "is given ['SYS_ADMIN']"),
    ("trial", "daemon['securityContext'].pop('capabilities')", "keeps capabilities"),
    ("trial", "daemon['securityContext'].update(readOnlyRootFilesystem=False)", "writable root file system"),
    ("gpu", "spec['volumes'].append({'name': 'd', 'hostPath': {'path': '/dev'}})", "mounts /dev"),
    ("gpu", "spec.pop('automountServiceAccountToken')", "a token"),
    ("gpu", "docs.append({'kind': 'ClusterRole', 'metadata': {'name': 'x'}})", "ClusterRole x"),
    ("gpu", "daemon.update(image='registry.example.com:5000/cachesvc')", "has no version"),
    ("gpu", "named('DaemonSet', 'cachesvc')['selector']['matchLabels'].update(a='b')", "does not select its own pods"),
    (
        "trial",
        "named('PodDisruptionBudget', 'engine')['selector']['matchLabels'].update(a='b')",
        "PodDisruptionBudget engine selects no pod",
    ),
    ("gpu", "daemon['readinessProbe']['grpc'].update(port=7443)", "readinessProbe asks"),
    ("gpu", "daemon['livenessProbe']['grpc'].pop('service')", "livenessProbe asks"),
    ("gpu", "configure('0.0.0.0:9465', '127.0.0.1:9465')", "probes cannot reach 127.0.0.1:9465"),
    (
        "monitored",
        "named('PodMonitor', 'cachesvc')['podMetricsEndpoints'][0].update(port='web')",
        "PodMonitor scrapes 'web'",
    ),
    ("tls", "named('Service', 'cachesvc')['ports'][0].update(targetPort='grpc')", "Service sends to 'grpc'"),
    (
        "tls",
        "named('NetworkPolicy', 'cachesvc-tls')['ingress'][0]['ports'].append({'port': 9464})",
        "opens [7443, 9464]",
    ),
    ("tls", "named('NetworkPolicy', 'cachesvc-tls')['ingress'][0].pop('from')", "lets in whole namespaces"),
    ("gpu", "named('NetworkPolicy', 'cachesvc').update(egress=[{}])", "call out"),
    ("gpu", "spec.update(terminationGracePeriodSeconds=30)", "killed after 30 s"),
    ("gpu", "named('DaemonSet', 'cachesvc')['updateStrategy']['rollingUpdate'].update(maxUnavailable=2)", "updates by"),
    ("gpu", "configure('host_pool = \"128GiB\"', 'host_pool = \"160GiB\"')", "bytes of memory, and needs"),
    ("trial", "configure('device_pool = \"256MiB\"', 'device_pool = \"1GiB\"')", "bytes of memory, and needs"),
    ("gpu", "daemon['resources']['limits'].update(cpu='4')", "throttle"),
    ("trial", "configure('/run/cachesvc/cachesvc.sock', '/tmp/cachesvc.sock')", "is not in /run/cachesvc"),
    ("trial", "configure('\"64010\"', '\"7\"')", "may not open the sockets"),
    ("trial", "configure(', 64011]', ']')", "uid 64011 may not map pools"),
    ("trial", "engine['securityContext'].pop('supplementalGroups')", "may not open"),
    ("trial", "engine['containers'][0]['volumeMounts'][0].pop('readOnly')", "could replace the socket"),
    ("engine", "named_volume(engine, 'sockets')['hostPath'].update(type='DirectoryOrCreate')", "would make the folder"),
    (
        "trial",
        "engine['initContainers'][0].update(command=['cachesvc', 'status'])",
        "runs cachesvc status, which wants a token",
    ),
    ("gpu", "configure('tokens = ', '# tokens = ')", "everybody may do everything"),
    (
        "trial",
        "named_volume(spec, 'tokens').update(secret={'secretName': 'x', 'defaultMode': 0o440})",
        "cachesvcd cannot read /etc/cachesvc/tokens/tokens.toml: the Secret has another key",
    ),
    ("gpu", "spec['securityContext'].pop('fsGroup')", "its mode or its group"),
    ("trial", "engine['containers'][0]['env'].pop(1)", "engine proves nothing"),
    ("engine", "engine['initContainers'][0]['env'].pop(1)", "await-cache proves nothing"),
    (
        "engine",
        "engine['containers'][0]['env'].append({'name': 'CACHESVC_TOKEN', 'value': 'x'})",
        "has its token in the environment",
    ),
    ("engine", "named_volume(engine, 'token').update(emptyDir={}, secret=None)", "no Secret is mounted there"),
    (
        "monitored",
        "named('PodMonitor', 'cachesvc')['podMetricsEndpoints'][0].pop('authorization')",
        "PodMonitor scrapes metrics without a token",
    ),
    ("engine", "engine.pop('initContainers')", "does not wait for the daemon"),
    (
        "gpu",
        "daemon['volumeMounts'].append({'name': 'x', 'mountPath': '/etc/x', 'subPath': 'x'})",
        "is a file mounted alone",
    ),
    ("gpu", "rename_config('cachesvc-config-7f2k9m4t8c')", "every change would roll the daemons"),
    ("gpu", "daemon['resources']['limits'].update({'nvidia.com/gpu': 1})", "claims nvidia"),
    ("gpu", "daemon['env'][0].update(value='0')", "does not see every GPU"),
)
"""Target, a statement that breaks its manifests, and words of the complaint."""


@pytest.mark.parametrize(("target", "change", "said"), BREAKS)
def test_rules_know_bad_from_good(target: str, change: str, said: str) -> None:
    documents = load(target)
    names: dict[str, Any] = {"docs": documents, "named_volume": named_volume}
    names |= {each.__name__: partial(each, documents) for each in (named, configure, rename_config)}
    if daemon_pod(documents) is not None:
        names |= {"spec": spec(documents), "daemon": daemon(documents)}
    if of_kind(documents, "Deployment"):
        names["engine"] = engine(documents)
    exec(change, names)
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
    configure(documents, "socket_group", "socket_grop")
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
