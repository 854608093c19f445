"""Stub of SGLang's kernels, of which there is no wheel for processors: a Llama on torch's own attention calls none."""

__version__ = "0.4.10"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}")

    return missing
