"""Settings of the plugin: a JSON object in the variable CACHESVC_SGLANG, for SGLang passes none on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields

from cachesvc_client.plugins.node import RESERVED_PAGES, Flags

from cachesvc_sglang.plain import EngineRefused

VARIABLE = "CACHESVC_SGLANG"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """``socket``: of the daemon; None: as every client, by CACHESVC_SOCKET. ``model``: names the weights instead of a
    digest of their files. ``weights_version``: of the weights that the engine starts with. ``tenant_salt``: a tenant's
    secret. ``token_file``: where the daemon wants tokens. ``host_blocks``: the host pool asked for by the first engine
    of the model, in blocks; None: all that is left, 0: none. ``stock_blocks``: pages kept at hand for decode.
    ``verify_steps``: for debugging, iterations between two checks of all sealed pages; 0: none.
    ``allow_untested_sglang``: start with a release that is not among those tested."""

    socket: str | None = None
    model: str | None = None
    weights_version: str = ""
    tenant_salt: str = ""
    token_file: str | None = None
    host_blocks: int | None = None
    stock_blocks: int = 64
    verify_steps: int = 0
    allow_untested_sglang: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            value, kind = getattr(self, each.name), _KINDS[each.name]
            if type(value) is not kind and not (value is None and each.default is None):
                raise EngineRefused(f"{VARIABLE}: {each.name} is {kind.__name__}, got {value!r}")
        for name, least in (("stock_blocks", 1), ("verify_steps", 0), ("host_blocks", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise EngineRefused(f"{VARIABLE}: {name} is at least {least}, got {value}")


_KINDS: dict[str, type] = {
    "socket": str,
    "model": str,
    "weights_version": str,
    "tenant_salt": str,
    "token_file": str,
    "host_blocks": int,
    "stock_blocks": int,
    "verify_steps": int,
    "allow_untested_sglang": bool,
}


def flags_of(page_tokens: int) -> Flags:
    """Names of SGLang's options, which count tokens, and not the page of padding."""
    return Flags("sglang", "--max-total-tokens", page_tokens, RESERVED_PAGES, "--context-length")


def read_settings(environment: Mapping[str, str]) -> EngineSettings:
    """Read the settings. Raises EngineRefused for what is none, or not of its type."""
    text = environment.get(VARIABLE, "") or "{}"
    try:
        given = json.loads(text)
    except ValueError as error:
        raise EngineRefused(
            f'{VARIABLE} is no JSON ({error}): write an object such as {{"stock_blocks": 64}}'
        ) from error
    if not isinstance(given, dict):
        raise EngineRefused(f"{VARIABLE} is a JSON object, got {text[:80]}")
    if unknown := sorted(set(given) - set(_KINDS)):
        raise EngineRefused(f"{VARIABLE} has {', '.join(unknown)}; what can be set is {', '.join(_KINDS)}")
    return EngineSettings(**given)
