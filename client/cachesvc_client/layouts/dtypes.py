"""Names of dtypes, as frameworks, configurations and people spell them, in the layout's own."""

from __future__ import annotations

from cachesvc.model.errors import LayoutRejected
from cachesvc.model.layout import ITEM_BYTES

SHORT_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "float8_e4m3": "float8_e4m3fn",
}


def dtype_name(dtype: object) -> str:
    """The layout's name of a dtype: ``bfloat16`` for ``"bf16"``, ``torch.bfloat16`` or a NumPy type of that name.

    Raises LayoutRejected, with the known ones, for any other.
    """
    spelled = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", dtype)
    bare = str(spelled).rpartition(".")[2].lower()
    name = SHORT_NAMES.get(bare, bare)
    if name not in ITEM_BYTES:
        shown = repr(dtype)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise LayoutRejected(f"unknown dtype {shown}; known are {', '.join(ITEM_BYTES)}, and {', '.join(SHORT_NAMES)}")
    return name
