"""Stub of a package whose wheels want CUDA: each name is a callable that gives more of the same."""

__version__ = "0.0"


class _Anything:
    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return _Anything()

    def __getattr__(self, name):
        return _Anything()

    def __mro_entries__(self, bases):
        return ()


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything()
