"""Reasons for which a test may be skipped: what each run of the tests may leave out, and which goal makes up for it.

A test that is skipped everywhere is no test. With ``CACHESVC_SKIPS=listed``, which ``.ci/run`` sets, a skip for any
other reason fails the run (``tests/conftest.py``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

GOAL_VARIABLE = "CACHESVC_GOAL"
"""Name of make's goal that runs the tests; a goal may not skip what it is there for."""

RUN_BY: dict[str, str] = {
    r"Mooncake|make mooncake-test": "mooncake-test",
    r"CACHESVC_ROUTERS|make (vllm|routers)-test installs the routers|make routers-test": "routers-test",
    r"CACHESVC_VLLM_PYTHON|make vllm-test": "vllm-test",
    r"CACHESVC_SGLANG_PYTHON|make sglang-test": "sglang-test",
    r"(torch|paddle) is not installed|could not import '(torch|paddle)'": "frameworks-test",
    r"buf is not installed here|make k8s-validate brings the schema": "test",
}
"""Reason, as a pattern, and the goal that runs these tests. ``.ci/run`` runs each of these goals."""

NOWHERE_IN_CI: dict[str, str] = {
    r"NVIDIA|libcuda|no GPU|needs a GPU|CUDA driver": "CI has no GPU: make gpu-test",
    r"CACHESVC_LONG=1": "long: CACHESVC_LONG=1 runs it",
    r"no traces in": "the traces are not part of the repository: CACHESVC_TRACES names their folder",
    r"this machine has no helm": "no package registry has helm",
    r"AVX-512": "vLLM has no caches of fp8 on other processors",
    r"no tmpfs may be mounted|only root may|only root can|needs root|not permitted": "a sandbox without these rights",
    r"no IPv6 loopback": "a sandbox without IPv6",
    r"the simulations ran in another process": "one process adds the runs of all up",
    r"shm does not wait|the streams of shm|its devices have one way in": "a case that this backend does not have",
    r"only the main thread can be interrupted": "a case of the main thread",
    r"this daemon has no setting": "manifests name settings of other objects as well",
}
"""Reason, as a pattern, and why no goal of ``.ci/run`` runs these tests."""


def unlisted(reasons: Mapping[str, str], goal: str | None = None) -> dict[str, str]:
    """Tests whose reason to be skipped is not listed for a goal, with that reason.

    ``reasons`` is by test. ``goal`` is taken from the environment where it is not given.
    """
    goal = os.environ.get(GOAL_VARIABLE, "") if goal is None else goal
    allowed = [*NOWHERE_IN_CI, *(reason for reason, by in RUN_BY.items() if by != goal)]
    return {test: reason for test, reason in reasons.items() if not any(re.search(each, reason) for each in allowed)}
