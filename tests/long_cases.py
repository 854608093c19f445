"""Cases that CI leaves out, and cases that run in a loop."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest
from _pytest.mark.structures import ParameterSet

IS_LONG = "CACHESVC_LONG" in os.environ
"""True where the whole of what CI takes a part of is to run."""
Test = TypeVar("Test", bound=Callable[..., object])


def long(*values: str | int) -> ParameterSet:
    """Make a case that only runs where ``CACHESVC_LONG`` is set: others are nearly as good."""
    is_left_out = pytest.mark.skipif(not IS_LONG, reason="CACHESVC_LONG=1 runs it")
    return pytest.param(*values, marks=is_left_out)


def looped(name: str, few: Iterable[object], many: Iterable[object] = ()) -> Callable[[Test], Test]:
    """Run one test in a loop, its argument ``name`` taken from ``few``, and with ``CACHESVC_LONG`` from ``many``.

    Fixtures are made once for the whole loop. A failure names the argument that it came with.
    """
    values = list(many) if IS_LONG else []
    values = values or list(few)

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(**others: object) -> None:
            for value in values:
                try:
                    test(**others, **{name: value})
                except BaseException as error:
                    error.add_note(f"{name}={value!r}")
                    raise

        signature = inspect.signature(test)
        others = [parameter for parameter in signature.parameters.values() if parameter.name != name]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run  # type: ignore[return-value]

    return decorate
