"""The awaited client is the blocking one with ``await``: the same names, arguments and answers."""

from __future__ import annotations

import inspect
import re
from typing import Any

import cachesvc_client as blocking
import pytest
from cachesvc_client import aio as awaited

TWINS = [
    (getattr(blocking, name.removeprefix("Async")), getattr(awaited, name))
    for name in awaited.__all__
    if name.startswith("Async")
]


@pytest.mark.parametrize(("one", "other"), TWINS, ids=lambda kind: kind.__name__)
def test_twins_have_the_same_names(one: type, other: type) -> None:
    assert public_names(one) == public_names(other)


@pytest.mark.parametrize(("one", "other"), TWINS, ids=lambda kind: kind.__name__)
def test_twins_take_the_same_arguments_and_answer_alike(one: type, other: type) -> None:
    for name in [*sorted(public_names(one)), "__init__"]:
        mine, its = getattr(one, name), getattr(other, name)
        if isinstance(mine, property):
            assert returned(mine.fget) == returned(its.fget), name
            continue
        if name == "__init__" and not one.__name__.endswith(("Client", "Subscriber")):
            continue  # made by others
        assert arguments(mine) == arguments(its), name
        assert returned(mine) == returned(its), name


def public_names(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def arguments(function: Any) -> list[tuple[str, Any, Any, str]]:
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default, bare(each.annotation)) for each in found]


def returned(function: Any) -> str:
    return bare(inspect.signature(function).return_annotation)


def bare(annotation: Any) -> str:
    """A type without what makes it awaited."""
    if not isinstance(annotation, str):
        return ""
    return re.sub(r"^Opening\[(.*)\]$", r"\1", annotation.replace("Async", ""))
