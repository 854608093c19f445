"""Render deploy/k8s into deploy/k8s/rendered: what is deployed can be read, tested and applied without kustomize.

python -m tools.k8s_render            # needs kubectl or kustomize
python -m tools.k8s_render --check    # fresh? by the sources' digest, and by rendering where one of them is there
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

KUBERNETES = Path(__file__).resolve().parent.parent / "deploy/k8s"
RENDERED = KUBERNETES / "rendered"
TARGETS = {
    "gpu": "overlays/gpu",
    "trial": "overlays/trial",
    "tls": "overlays/tls",
    "monitored": "overlays/monitored",
    "local-disk": "overlays/local-disk",
    "engine": "examples/engine",
    "vllm": "examples/vllm",
    "sglang": "examples/sglang",
}
COMMANDS = (("kubectl", "kustomize"), ("kustomize", "build"))
OLDEST_KUSTOMIZE = (5, 0)
"""Earlier ones lack components or labels."""


def digest() -> str:
    """SHA-256 over names and contents of all sources."""
    total = hashlib.sha256()
    for path in sorted(KUBERNETES.rglob("*")):
        if path.is_file() and RENDERED not in path.parents:
            for part in (path.relative_to(KUBERNETES).as_posix().encode(), path.read_bytes()):
                total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()


def renderer() -> tuple[str, ...] | None:
    """The command that this machine has for it; None without one that is new enough."""
    here = (command for command in COMMANDS if shutil.which(command[0]))
    return next((command for command in here if _version(command) >= OLDEST_KUSTOMIZE), None)


def _version(command: tuple[str, ...]) -> tuple[int, ...]:
    """Version of the kustomize in it; (0,) where it prints none."""
    arguments = ("version", "--client") if command[0] == "kubectl" else ("version",)
    said = subprocess.run([command[0], *arguments], capture_output=True, text=True, check=False).stdout
    found = re.search(r"Kustomize Version: v(\d+)\.(\d+)" if command[0] == "kubectl" else r"v(\d+)\.(\d+)", said)
    return tuple(int(part) for part in found.groups()) if found else (0,)


def render(command: tuple[str, ...], source: str) -> str:
    """Render one target. Raises CalledProcessError; its cause is on standard error."""
    done = subprocess.run([*command, str(KUBERNETES / source)], stdout=subprocess.PIPE, text=True, check=True)
    return (
        f"# Rendered by `make k8s-render` from deploy/k8s/{source}; change that instead.\n# sources: {digest()}\n"
        + done.stdout
    )


def stale() -> list[str]:
    """Names of targets whose file is missing, of other sources, or not what the renderer makes of them."""
    found = []
    command = renderer()
    for name, source in TARGETS.items():
        path = RENDERED / f"{name}.yaml"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        told = re.search(r"^# sources: (\w+)$", text, re.MULTILINE)
        if (
            told is None
            or told[1] != digest()
            or (command is not None and _objects(render(command, source)) != _objects(text))
        ):
            found.append(name)
    return found


def _objects(text: str) -> dict[tuple[str, str], Any]:
    """By kind and name: releases of kustomize differ in order and indentation."""
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text) if each}


def main() -> None:
    """Write the files, or check them."""
    parser = argparse.ArgumentParser(description="Render deploy/k8s.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file is stale")
    if parser.parse_args().check:
        if names := stale():
            sys.exit(f"deploy/k8s/rendered is stale: {', '.join(names)}; run make k8s-render and commit it")
        return
    command = renderer()
    if command is None:
        sys.exit("neither kubectl nor kustomize is here, and one is needed to render deploy/k8s")
    RENDERED.mkdir(exist_ok=True)
    for name, source in TARGETS.items():
        (RENDERED / f"{name}.yaml").write_text(render(command, source), encoding="utf-8")


if __name__ == "__main__":
    main()
