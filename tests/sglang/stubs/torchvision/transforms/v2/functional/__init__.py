"""Stub: see ``torchvision``."""

from torchvision import __getattr__  # noqa: F401


class InterpolationMode:
    """Modes that SGLang names."""

    NEAREST = NEAREST_EXACT = BILINEAR = BICUBIC = LANCZOS = BOX = HAMMING = 0
