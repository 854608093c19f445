"""Rendered manifests as Python sees them: documents, pods, quantities, and the daemon that a pod starts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from cachesvc.__main__ import read_flags
from cachesvc.config import Config, load_config
from tools.k8s_render import RENDERED

Doc = dict[str, Any]
DAEMON = {"app.kubernetes.io/name": "cachesvc", "app.kubernetes.io/component": "daemon"}
_UNITS = {"": 1.0, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 1e3, "M": 1e6, "G": 1e9}


class Pod(NamedTuple):
    """A workload's pods. ``owner`` is the workload."""

    owner: Doc
    template: Doc

    @property
    def spec(self) -> Doc:
        """The pod's own spec."""
        spec: Doc = self.template["spec"]
        return spec

    @property
    def labels(self) -> dict[str, str]:
        """Labels that selectors see."""
        labels: dict[str, str] = self.template["metadata"]["labels"]
        return labels

    @property
    def containers(self) -> list[Doc]:
        """All, the first ones first."""
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]


def load(name: str) -> list[Doc]:
    """The documents of a rendered file."""
    text = (RENDERED / f"{name}.yaml").read_text(encoding="utf-8")
    return [document for document in yaml.safe_load_all(text) if document]


def of_kind(documents: list[Doc], *kinds: str) -> list[Doc]:
    """Those of some kinds."""
    return [document for document in documents if document["kind"] in kinds]


def pods(documents: list[Doc]) -> list[Pod]:
    """The pods of every workload."""
    return [Pod(owner, owner["spec"]["template"]) for owner in of_kind(documents, "DaemonSet", "Deployment")]


def daemon_pod(documents: list[Doc]) -> Pod | None:
    """The daemon's, where these documents deploy one."""
    return next((pod for pod in pods(documents) if pod.owner["kind"] == "DaemonSet"), None)


def quantity(text: str | int) -> float:
    """Bytes or cores of a Kubernetes quantity."""
    match = re.fullmatch(r"([\d.]+)([A-Za-z]*)", str(text))
    assert match is not None, text
    return float(match[1]) * _UNITS[match[2]]


def mounts(container: Doc) -> dict[str, Doc]:
    """Volume mounts by path."""
    return {mount["mountPath"]: mount for mount in container.get("volumeMounts", ())}


def config_of(documents: list[Doc], pod: Pod, folder: Path) -> Config:
    """The configuration that the daemon's own parser and loader make of its arguments and its ConfigMap.

    Raises InvalidRequest as the daemon would; SystemExit for a flag that it does not know.
    """
    (container,) = pod.spec["containers"]
    path, flags, _ = read_flags(container["args"])
    assert path is not None
    mount = mounts(container)[str(Path(path).parent)]
    assert "subPath" not in mount, "a file mounted alone never changes"
    volume = next(volume for volume in pod.spec["volumes"] if volume["name"] == mount["name"])
    (config_map,) = [
        each for each in of_kind(documents, "ConfigMap") if each["metadata"]["name"] == volume["configMap"]["name"]
    ]
    file = folder / "config.toml"
    file.write_text(config_map["data"][Path(path).name], encoding="utf-8")
    return load_config(str(file), flags)


def selects(selector: Doc, labels: dict[str, str]) -> bool:
    """True where a label selector of ``matchLabels`` alone takes these labels."""
    assert set(selector) == {"matchLabels"}, selector
    return bool(selector["matchLabels"].items() <= labels.items())


def host_paths(pod: Pod) -> Iterator[tuple[str, Doc]]:
    """Name and source of every hostPath volume."""
    for volume in pod.spec.get("volumes", ()):
        if "hostPath" in volume:
            yield volume["name"], volume["hostPath"]
