"""Write the Helm chart from the rendered manifests: ``python -m tools.helm_chart [--check]``.

The kustomize overlay for GPUs is the source. A chart's template is one of its objects with some values taken out, each
as JSON, which is YAML too: so with its own values the chart gives the overlay's objects, and ``rendered`` shows that
without Helm.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from cachesvc import __version__
from tools.k8s_render import RENDERED
from tools.results import ROOT

CHART = ROOT / "deploy" / "helm" / "cachesvc"
SOURCE = "gpu"
NAMESPACE = "cachesvc"
EXPRESSION = re.compile(r"\{\{ toJson \.Values\.(\w+) \}\}|\{\{ \.Release\.Namespace \}\}")


class Value(NamedTuple):
    """A value of the chart: its name, what it is for, and the paths in objects by kind that it stands at."""

    name: str
    purpose: str
    places: tuple[tuple[str, tuple[str | int, ...]], ...]


POD = ("spec", "template", "spec")
DAEMON = (*POD, "containers", 0)
VALUES = (
    Value(
        "image",
        "Image of the daemon: build it (deploy/docker/Dockerfile), push it, and name it by its digest.",
        (("DaemonSet", (*DAEMON, "image")), ("DaemonSet", (*POD, "initContainers", 0, "image"))),
    ),
    Value(
        "config",
        "The daemon's config.toml, whole. device_pool and host_pool are for your nodes; the socket's folder stays.",
        (("ConfigMap", ("data", "config.toml")),),
    ),
    Value(
        "resources",
        "Requests and limits of the daemon, by `python -m tools.pod_resources` from config: no CPU limit.",
        (("DaemonSet", (*DAEMON, "resources")),),
    ),
    Value("nodeSelector", "Nodes that get a daemon.", (("DaemonSet", (*POD, "nodeSelector")),)),
    Value("tolerations", "Taints that it tolerates.", (("DaemonSet", (*POD, "tolerations")),)),
    Value("runtimeClassName", "RuntimeClass that gives it all GPUs.", (("DaemonSet", (*POD, "runtimeClassName")),)),
    Value(
        "terminationGracePeriodSeconds",
        "Longer than drain_seconds of config.",
        (("DaemonSet", (*POD, "terminationGracePeriodSeconds")),),
    ),
    Value("env", "Environment of the daemon: the GPUs that it sees.", (("DaemonSet", (*DAEMON, "env")),)),
)


def main() -> None:
    """Write the chart, or with ``--check`` fail where a file is not what the overlay says."""
    for path, text in chart().items():
        if "--check" not in sys.argv[1:]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path.relative_to(ROOT)} is stale: run python -m tools.helm_chart")


def chart() -> dict[Path, str]:
    """Files of the chart."""
    objects = _objects()
    values = {value.name: _at(_named(objects, value.places[0][0]), value.places[0][1]) for value in VALUES}
    for value in VALUES:
        for kind, path in value.places:
            _put(_named(objects, kind), path, f"@@{value.name}@@")
    files = {
        CHART / "Chart.yaml": _chart_file(),
        CHART / "values.yaml": _values_file(values),
        CHART / "README.md": _read_me(values),
    }
    for each in objects:
        text = yaml.safe_dump(each, sort_keys=False, width=1000)
        text = re.sub(r"'?@@(\w+)@@'?", r"{{ toJson .Values.\1 }}", text)
        text = re.sub(
            rf"^(  namespace|    namespace): {NAMESPACE}$", r"\1: {{ .Release.Namespace }}", text, flags=re.MULTILINE
        )
        name = f"{each['kind'].lower()}-{each['metadata']['name']}.yaml"
        files[CHART / "templates" / name] = "# Made by tools/helm_chart.py from deploy/k8s.\n" + text
    return files


def rendered(values: Mapping[str, Any], namespace: str = NAMESPACE) -> list[dict[str, Any]]:
    """Objects that Helm makes of the chart's templates: they have no other expressions than these."""

    def value(match: re.Match[str]) -> str:
        return json.dumps(values[match[1]]) if match[1] else namespace

    texts = (path.read_text(encoding="utf-8") for path in sorted((CHART / "templates").glob("*.yaml")))
    return [yaml.safe_load(EXPRESSION.sub(value, text)) for text in texts]


def _objects() -> list[dict[str, Any]]:
    """Objects of the overlay but for the namespace, which is the release's."""
    text = (RENDERED / f"{SOURCE}.yaml").read_text(encoding="utf-8")
    return [each for each in yaml.safe_load_all(text) if each and each["kind"] != "Namespace"]


def _named(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(each for each in objects if each["kind"] == kind)


def _at(found: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        found = found[step]
    return found


def _put(found: Any, path: tuple[str | int, ...], value: str) -> None:
    _at(found, path[:-1])[path[-1]] = value


def _chart_file() -> str:
    return f"""# Made by tools/helm_chart.py from deploy/k8s.
apiVersion: v2
name: cachesvc
description: KV cache of the LLM engines of a GPU node, one daemon a node
type: application
version: {__version__}
appVersion: "{__version__}"
kubeVersion: ">=1.29.0-0"
"""


def _values_file(values: Mapping[str, Any]) -> str:
    parts = ["# Made by tools/helm_chart.py from deploy/k8s; README.md has the steps before an install."]
    for value in VALUES:
        held = values[value.name]
        if isinstance(held, str) and "\n" in held:
            text = f"{value.name}: |\n" + "".join(f"  {line}\n" for line in held.splitlines())
        else:
            text = yaml.safe_dump({value.name: held}, sort_keys=False, width=1000)
        parts.append(f"\n# {value.purpose}\n{text.rstrip()}")
    return "\n".join(parts) + "\n"


def _read_me(values: Mapping[str, Any]) -> str:
    rows = []
    for value in VALUES:
        held = values[value.name]
        shown = "see values.yaml" if isinstance(held, dict | list) or "\n" in str(held) else f"`{held}`"
        rows.append(f"| `{value.name}` | {shown} | {value.purpose} |")
    return f"""# Helm chart

Made from the kustomize overlay `deploy/k8s/overlays/gpu`, which stays the source: with its own values the chart gives
the same objects. No cluster has run it. It has no values for TLS, metrics, storage or other nodes: add their settings
to `config`, and for their objects take the kustomize components `tls` and `monitoring`.

    kubectl create namespace cachesvc
    kubectl label namespace cachesvc pod-security.kubernetes.io/enforce=privileged   # for the hostPath volume alone
    kubectl create namespace engines                                                # one for each namespace of engines
    helm install cachesvc deploy/helm/cachesvc --namespace cachesvc --values mine.yaml
    deploy/k8s/tokens.sh operator.token engines | kubectl apply -f -                 # until then the pods wait

A change of `config` rolls no daemon: `cachesvc reload` applies what changes live (docs/deploying.md).

| value | default | what it is for |
| --- | --- | --- |
{chr(10).join(rows)}
"""


if __name__ == "__main__":
    main()
