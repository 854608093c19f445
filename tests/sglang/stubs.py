"""Stubs of packages that SGLang imports and a Llama on a processor does not use.

They are for the tests' environment alone, and no part of the product.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

NAMES = (
    *("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.transforms.v2"),
    *("torchvision.transforms.v2.functional", "torchvision.io", "torchvision.ops", "torchvision.models"),
    *("sgl_kernel", "IPython", "IPython.display"),
)


class Anything:
    """Callable of which each attribute, and each result, is one more."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> Anything:
        return Anything()

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return ()


class Stub(ModuleType):
    """Module that has every name. Those of ``sgl_kernel`` raise when they are called: none may be."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._missing if self.__name__ == "sgl_kernel" else Anything()

    def _missing(self, *args: object, **kwargs: object) -> object:
        raise NotImplementedError("sgl_kernel has no build for processors")


def install() -> None:
    """Let the stubs be imported in this process."""
    for name in (each for each in NAMES if not isinstance(sys.modules.get(each), Stub)):
        module = Stub(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__["__version__"] = "0.4.10"
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
