"""The awaited client is the blocking one with ``await``: the same names, arguments and answers."""

from __future__ import annotations

import inspect
import re
from typing import Any

import cachesvc_client as blocking
from cachesvc_client import aio as awaited


def test_the_awaited_client_has_the_names_arguments_and_answers_of_the_blocking_one() -> None:
    for name in awaited.__all__:
        one, other = getattr(blocking, name.removeprefix("Async")), getattr(awaited, name)
        assert public_names(one) == public_names(other) - {"record"}
        for each in [*sorted(public_names(one)), *(["__init__"] if name.endswith(("Client", "Subscriber")) else [])]:
            if not isinstance(getattr(one, each), property):
                assert form(getattr(one, each)) == form(getattr(other, each)), each


def public_names(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def form(function: Any) -> tuple[object, ...]:
    """Arguments of a call and the type that it returns, without what makes it awaited."""
    signature = inspect.signature(function)
    taken = [(each.name, each.kind, each.default, bare(each.annotation)) for each in signature.parameters.values()]
    return (*taken, bare(signature.return_annotation))


def bare(annotation: Any) -> str:
    if not isinstance(annotation, str):
        return ""
    return re.sub(r"^Opening\[(.*)\]$", r"\1", annotation.replace("Async", ""))
