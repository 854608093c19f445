"""The table of what works with what: from the code, the tests and the recorded runs that say so."""

from __future__ import annotations

import json
import re
import tomllib

from cachesvc.machine import EARLIEST_PYTHON, KERNEL_OF_HUGE_PAGES, KERNEL_OF_PIDFDS, LATEST_PYTHON, LEAST_CUDA
from tools.results import RESULTS, ROOT, rows

PAGE = ROOT / "docs" / "deploying.md"


def compatibility() -> str:
    """Each part, the versions that are tested, and what others cost."""
    project = _project()
    needs = ", ".join(f"`{each}`" for each in project["dependencies"][:2])
    body = [
        ["Python", f"{_dotted(EARLIEST_PYTHON)} to {_dotted(LATEST_PYTHON)}", f"`{project['requires-python']}`"],
        ["gRPC, protobuf in an engine", needs, "pip refuses"],
        ["NVIDIA driver", f"CUDA {_dotted(LEAST_CUDA)} or later", "the daemon takes shared memory, or refuses `cuda`"],
        ["GPUs, with recorded runs", ", ".join(_gpus()), "any that the driver knows; MIG slices cannot be shared"],
        ["Linux", f"{_dotted(KERNEL_OF_PIDFDS)} or later", "an engine's end in another pod is seen later"],
        ["", f"{_dotted(KERNEL_OF_HUGE_PAGES)} or later", "the host pool has small pages, and fills slower"],
        ["vLLM", ", ".join(_tested("vllm")), "refused, unless `allow_untested_vllm`"],
        ["SGLang", ", ".join(_tested("sglang")), "refused, unless `allow_untested_sglang`"],
        ["Kubernetes", f"schemas of {', '.join(_kubernetes())}", "not applied to a cluster"],
    ]
    return rows(["part", "tested", "otherwise"], body)


def _dotted(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]}.{numbers[1]}"


def _project() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert isinstance(project, dict)
    return project


def _gpus() -> list[str]:
    """Names of GPUs that a recorded result was measured on."""
    machines = (json.loads(path.read_text(encoding="utf-8")).get("machine") for path in RESULTS.glob("*.json"))
    return sorted({str(each["gpu"]) for each in machines if isinstance(each, dict) and "gpu" in each})


def _tested(engine: str) -> list[str]:
    """Releases of an engine that its connector takes; the connector's module would import the engine."""
    (path,) = (ROOT / f"client/cachesvc_{engine}").rglob("refusals.py")
    (found,) = re.findall(r"^TESTED = \((.*)\)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    numbers = [each.replace(", ", ".") for each in re.findall(r"\((\d+(?:, \d+)+)\)", found)]
    return numbers + re.findall(r'"([^"]+)"', found)


def _kubernetes() -> list[str]:
    """Releases whose published schemas the manifests are held to."""
    text = (ROOT / "tests/deploy/test_schemas.py").read_text(encoding="utf-8")
    (found,) = re.findall(r"^VERSIONS = \((.*)\)$", text, re.MULTILINE)
    return re.findall(r'"([\d.]+)"', found)
