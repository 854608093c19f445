"""Releases of vLLM that this connector was tested with. It replaces vLLM's block pool, whose methods are not a public
API."""

from __future__ import annotations

import re

from cachesvc_vllm.daemon.errors import ConnectorRefused

TESTED = ((0, 32), (0, 33))


def require_version(version: str, *, allow_any: bool) -> None:
    """Raises ConnectorRefused for a release of vLLM that is not among ``TESTED``, unless ``allow_any``."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) in TESTED:
        return
    known = " and ".join(f"{major}.{minor}" for major, minor in TESTED)
    if not allow_any:
        raise ConnectorRefused(
            f"cachesvc_vllm works with vLLM {known}, and this is {version}: install one of these, or try it at your "
            'own risk with "allow_untested_vllm": true in kv_connector_extra_config'
        )
