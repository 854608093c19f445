"""Rules of every set of manifests. A rule lists its violations in words.

Schemas pass a selector that selects nothing, a probe of a port without a server, or a pool that exceeds its pod.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from cachesvc_ctl.actions import Wait
from cachesvc_ctl.main import parse

from cachesvc.config import Config
from cachesvc.hardware import check_shm_memory
from cachesvc.memory.numa import MemoryLimit
from cachesvc.model.errors import InvalidRequest
from cachesvc.service.host.health import LIVE
from tests.deploy.manifests import Doc, Pod, config_of, daemon_pod, host_paths, mounts, of_kind, pods, quantity, selects
from tools.pod_resources import resources_of

SOCKETS = "/run/cachesvc"
DISK = "/var/cache/cachesvc"
"""Folder of daemons whose cache outlives them."""
CLOSE_SECONDS = 10
"""Time in which a daemon closes everything once it has drained."""
CAPABILITIES = {"own-the-folder": ["CHOWN"], "cachesvcd": ["SYS_NICE"]}
"""All that any container may have; why stands beside each in the manifests."""
SECRET_MODE = 0o440
"""Mode of a Secret's files, which are root's and of the pod's fsGroup."""
NETWORK_PORTS = {"cachesvc": set(), "cachesvc-tls": {7443}, "cachesvc-metrics": {9464}}


def confined(documents: list[Doc]) -> Iterator[str]:
    """Require that a pod gets no part of the host but the sockets' folder and the cache's own disk, no root without
    need, nothing writable, and no privileges."""
    for pod in pods(documents):
        for setting in ("hostIPC", "hostPID", "hostNetwork", "shareProcessNamespace"):
            if pod.spec.get(setting):
                yield f"{setting} is on"
        if pod.spec["securityContext"].get("runAsNonRoot") is not True or not pod.spec["securityContext"]["runAsUser"]:
            yield "the pod may run as root"
        if pod.spec["securityContext"].get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield "no seccomp profile"
        allowed = (SOCKETS, DISK) if "cachesvcd" in [each["name"] for each in pod.containers] else (SOCKETS,)
        yield from (f"mounts {source['path']}" for _, source in host_paths(pod) if source["path"] not in allowed)
        for container in pod.containers:
            yield from _confined_container(container)


def _confined_container(container: Doc) -> Iterator[str]:
    name, context = container["name"], container.get("securityContext", {})
    if context.get("privileged"):
        yield f"{name} is privileged"
    if context.get("allowPrivilegeEscalation") is not False:
        yield f"{name} may gain privileges"
    if context.get("readOnlyRootFilesystem") is not True and not container["image"].startswith(
        "registry.example.com/engine"
    ):
        yield f"{name} has a writable root file system"
    if context.get("capabilities", {}).get("drop") != ["ALL"]:
        yield f"{name} keeps capabilities"
    added = context.get("capabilities", {}).get("add", [])
    if not set(added) <= set(CAPABILITIES.get(name, ())):
        yield f"{name} is given {added}"
    if context.get("runAsUser") == 0 and name != "own-the-folder":
        yield f"{name} runs as root"


def powerless(documents: list[Doc]) -> Iterator[str]:
    """Require that no pod may ask the API server for anything."""
    kinds = ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")
    yield from (f"{document['kind']} {document['metadata']['name']}" for document in of_kind(documents, *kinds))
    for holder in [*of_kind(documents, "ServiceAccount"), *(pod.spec for pod in pods(documents))]:
        if holder.get("automountServiceAccountToken") is not False:
            yield "a token of the API server is mounted"


def pinned(documents: list[Doc]) -> Iterator[str]:
    """Every image has a version."""
    for pod in pods(documents):
        for container in pod.containers:
            tag = container["image"].rpartition("/")[2].partition(":")[2]
            if tag in ("", "latest"):
                yield f"{container['name']}: image {container['image']} has no version"
            if container.get("imagePullPolicy") == "Always":
                yield f"{container['name']}: pulls at every start"


def selected(documents: list[Doc]) -> Iterator[str]:
    """Selectors select what they are meant for: workloads their pods, everything else some pod."""
    found = pods(documents)
    for pod in found:
        if not selects(pod.owner["spec"]["selector"], pod.labels):
            yield f"{pod.owner['metadata']['name']} does not select its own pods"
    for document in of_kind(documents, "PodMonitor", "NetworkPolicy", "PodDisruptionBudget", "Service"):
        spec = document["spec"]
        selector = spec["podSelector"] if document["kind"] == "NetworkPolicy" else spec["selector"]
        selector = {"matchLabels": selector} if document["kind"] == "Service" else selector
        if not any(
            selects(selector, pod.labels) and pod.owner["metadata"]["namespace"] == document["metadata"]["namespace"]
            for pod in found
        ):
            yield f"{document['kind']} {document['metadata']['name']} selects no pod"


def probed(documents: list[Doc]) -> Iterator[str]:
    """Probes ask the daemon's health port for what each is about; ports that others name are declared."""
    pod = daemon_pod(documents)
    if pod is None:
        return
    (container,) = pod.spec["containers"]
    config = _config(documents, pod)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    health = int(config.health_listen.rpartition(":")[2] or 0)
    if not config.health_listen.startswith("0.0.0.0:") or ports.get("health") != health:
        yield f"probes cannot reach {config.health_listen or 'a daemon without health_listen'}"
    for probe, service in (("startupProbe", ""), ("readinessProbe", ""), ("livenessProbe", LIVE)):
        asked = container.get(probe, {}).get("grpc", {})
        if (asked.get("port"), asked.get("service", "")) != (health, service):
            yield f"{probe} asks {asked}, not service {service!r} on port {health}"
    if config.listen and ports.get("grpc-tls") != int(config.listen.rpartition(":")[2]):
        yield f"listens on {config.listen}, which is not the port grpc-tls"
    for monitor in of_kind(documents, "PodMonitor"):
        yield from (
            f"PodMonitor scrapes {end['port']!r}, which no container has"
            for end in monitor["spec"]["podMetricsEndpoints"]
            if end["port"] not in ports
        )
    for front in of_kind(documents, "Service"):
        yield from (
            f"Service sends to {port['targetPort']!r}, which no container has"
            for port in front["spec"]["ports"]
            if port["targetPort"] not in ports
        )


def fenced(documents: list[Doc]) -> Iterator[str]:
    """The network: nothing out, and in only what NETWORK_PORTS says, from named callers."""
    if daemon_pod(documents) is None:
        return
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in of_kind(documents, "NetworkPolicy")}
    if set(policies.get("cachesvc", {}).get("policyTypes", ())) != {"Ingress", "Egress"}:
        yield "nothing denies by default"
    for name, spec in policies.items():
        if spec.get("egress"):
            yield f"{name} lets the daemon call out"
        for rule in spec.get("ingress", ()):
            opened = {port["port"] for port in rule.get("ports", ())}
            if not opened or not opened <= NETWORK_PORTS.get(name, set()):
                yield f"{name} opens {sorted(opened) or 'every port'}"
            if not rule.get("from") or not all(
                {"namespaceSelector", "podSelector"} <= set(peer) for peer in rule["from"]
            ):
                yield f"{name} lets in whole namespaces"


def patient(documents: list[Doc]) -> Iterator[str]:
    """A pod is killed only after its drain, and nodes follow one another."""
    pod = daemon_pod(documents)
    if pod is None:
        return
    drain = _config(documents, pod).drain_seconds
    grace = pod.spec["terminationGracePeriodSeconds"]
    if grace < drain + min(1.0, drain) + CLOSE_SECONDS:
        yield f"killed after {grace} s, but a drain takes up to {drain} s"
    strategy = pod.owner["spec"]["updateStrategy"]
    if strategy != {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}:
        yield f"updates by {strategy}"
    if pod.spec.get("priorityClassName") != "system-node-critical":
        yield "engines could push the daemon from its node"


def sized(documents: list[Doc]) -> Iterator[str]:
    """A pod asks for what its pools need, neither less nor half as much again, and the daemon would start in it."""
    pod = daemon_pod(documents)
    if pod is None:
        return
    config = _config(documents, pod)
    gpus = int(pod.owner["metadata"].get("annotations", {}).get("cachesvc/gpus", 0))
    resources = pod.spec["containers"][0]["resources"]
    wanted = resources_of(config, gpus)
    memory = quantity(resources["requests"]["memory"])
    if not wanted.memory_bytes <= memory <= 1.5 * wanted.memory_bytes:
        yield f"asks for {memory:.0f} bytes of memory, and needs {wanted.memory_bytes}"
    if quantity(resources["limits"]["memory"]) != memory:
        yield "memory: limit and request differ"
    if quantity(resources["requests"]["cpu"]) * 1000 < wanted.millicores:
        yield f"asks for {resources['requests']['cpu']} CPU, and needs {wanted.millicores}m"
    if "cpu" in resources["limits"]:
        yield "a CPU limit would throttle every call on the node"
    if config.backend == "shm":
        try:
            check_shm_memory(config, (MemoryLimit("limits.memory", int(memory)),))
        except InvalidRequest as refusal:
            yield str(refusal)
        if (bool(gpus)) != (config.backend == "cuda"):
            yield "GPUs, and no backend for them"


def shared(documents: list[Doc]) -> Iterator[str]:
    """Engines find their node's socket: same folder, a group and a uid that the daemon lets in, nothing to write."""
    daemon = daemon_pod(documents)
    for pod in pods(documents):
        for container in pod.containers:
            mount = mounts(container).get(SOCKETS)
            if mount is None:
                yield f"{container['name']} has no {SOCKETS}"
            elif pod is not daemon and pod.owner["kind"] == "Deployment" and not mount.get("readOnly"):
                yield f"{container['name']} could replace the socket"
        if pod.owner["kind"] == "Deployment":
            yield from _engine(pod)
    if daemon is None:
        return
    config = _config(documents, daemon)
    context = daemon.spec["securityContext"]
    if not config.socket.startswith(SOCKETS + "/"):
        yield f"the socket {config.socket} is not in {SOCKETS}"
    if str(context["runAsGroup"]) != config.socket_group:
        yield f"the daemon is not of the group {config.socket_group}"
    for pod in pods(documents):
        own = pod.spec["securityContext"]
        if own["runAsUser"] not in config.allow_uids:
            yield f"uid {own['runAsUser']} may not map pools"
        if int(config.socket_group) not in [own["runAsGroup"], *own.get("supplementalGroups", ())]:
            yield f"{pod.owner['metadata']['name']} may not open the sockets"
        for container in pod.containers:
            for setting in container.get("env", ()):
                if setting["name"] == "CACHESVC_SOCKET" and setting["value"] != config.socket:
                    yield f"{container['name']} looks for {setting['value']}"


def proven(documents: list[Doc]) -> Iterator[str]:
    """Require proof of identity: the daemon has tokens, and each of its clients has a Secret with one."""
    for pod in pods(documents):
        is_daemon = pod.owner["kind"] == "DaemonSet"
        for container in pod.spec["containers"] if is_daemon else pod.containers:
            named = {setting["name"]: setting.get("value", "") for setting in container.get("env", ())}
            path = _config(documents, pod).tokens if is_daemon else named.get("CACHESVC_TOKEN_FILE", "")
            if "CACHESVC_TOKEN" in named:
                yield f"{container['name']} has its token in the environment, where every child and a crash dump has it"
            if not path:
                yield "everybody may do everything" if is_daemon else f"{container['name']} proves nothing"
            elif why := _unreadable(pod, container, path):
                yield f"{container['name']} cannot read {path}: {why}"
    for monitor in of_kind(documents, "PodMonitor"):
        for end in monitor["spec"]["podMetricsEndpoints"]:
            if set(end.get("authorization", {}).get("credentials", ())) != {"name", "key"}:
                yield f"PodMonitor scrapes {end['port']} without a token"


def _unreadable(pod: Pod, container: Doc, path: str) -> str:
    """Reason why a container's user cannot read a file of a Secret; empty where it can."""
    mount = mounts(container).get(str(Path(path).parent))
    volume: Doc = next(
        (each for each in pod.spec["volumes"] if mount is not None and each["name"] == mount["name"]), {}
    )
    secret = volume.get("secret")
    if mount is None or secret is None:
        return "no Secret is mounted there"
    if not mount.get("readOnly"):
        return "it is not mounted read-only"
    if Path(path).name not in [each["path"] for each in secret.get("items", [{"path": "token"}])]:
        return "the Secret has another key"
    context = pod.spec["securityContext"]
    if secret.get("defaultMode") != SECRET_MODE or context.get("fsGroup") != context["runAsGroup"]:
        return "its mode or its group"
    return ""


def _engine(pod: Pod) -> Iterator[str]:
    if [source["type"] for _, source in host_paths(pod)] != ["Directory"]:
        yield "an engine that comes first would make the folder as root's"
    for container in pod.containers:
        if "CACHESVC_SOCKET" not in {setting["name"] for setting in container.get("env", ())}:
            yield f"{container['name']} is not told where the socket is"


def waiting(documents: list[Doc]) -> Iterator[str]:
    """Require that the init container of an engine waits for a ready daemon, and gives up in the end."""
    for pod in pods(documents):
        for container in pod.spec.get("initContainers", ()):
            program, *words = container["command"]
            if program != "cachesvc":
                continue
            if words[:1] != ["wait"]:
                yield f"{container['name']} runs cachesvc {words[0]}, which wants a token and does not wait"
            elif parse(words).command is not Wait:
                yield f"{container['name']} does not wait"
        if pod.owner["kind"] == "Deployment" and not pod.spec.get("initContainers"):
            yield f"{pod.owner['metadata']['name']} does not wait for the daemon"


def live(documents: list[Doc]) -> Iterator[str]:
    """A changed setting reaches the running daemon: its file's folder is mounted, under a name that stays."""
    pod = daemon_pod(documents)
    if pod is None:
        return
    (container,) = pod.spec["containers"]
    for path, mount in mounts(container).items():
        if "subPath" in mount:
            yield f"{path} is a file mounted alone, which never changes"
    for volume in pod.spec["volumes"]:
        if re.search(r"-[a-z0-9]{10}$", volume.get("configMap", {}).get("name", "")):
            yield f"{volume['name']} has a name of its content: every change would roll the daemons"


def unclaimed(documents: list[Doc]) -> Iterator[str]:
    """The daemon claims no GPU; where it uses them, it sees all."""
    pod = daemon_pod(documents)
    if pod is None:
        return
    (container,) = pod.spec["containers"]
    for kind in ("requests", "limits"):
        yield from (f"claims {name}" for name in container["resources"].get(kind, ()) if "/" in name)
    if pod.spec.get("resourceClaims"):
        yield "claims devices"
    if _config(documents, pod).backend == "cuda":
        environment = {setting["name"]: setting.get("value") for setting in container.get("env", ())}
        if pod.spec.get("runtimeClassName") != "nvidia" or environment.get("NVIDIA_VISIBLE_DEVICES") != "all":
            yield "does not see every GPU"


RULES: tuple[Callable[[list[Doc]], Iterator[str]], ...] = (
    confined, powerless, pinned, selected, probed, fenced, patient, sized, shared, proven, waiting, live, unclaimed,
)  # fmt: skip


def complaints(documents: list[Doc]) -> list[str]:
    """Violations of all rules."""
    return [f"{rule.__name__}: {said}" for rule in RULES for said in rule(documents)]


def _config(documents: list[Doc], pod: Pod) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        return config_of(documents, pod, Path(folder))
