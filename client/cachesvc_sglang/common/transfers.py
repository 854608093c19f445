"""Copies of page ids and slots to the device, which stop no step under way."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.utils.common import is_pin_memory_available


def to_device(numbers: npt.NDArray[np.int64], device: Any) -> Any:
    """Put a copy into the current stream, and go on. Out of memory that is not pinned the driver may wait for the
    stream first. SGLang's scheduler has that wait for the whole prefill before it."""
    tensor = torch.from_numpy(numbers)
    is_pinned = is_pin_memory_available(device)
    return (tensor.pin_memory() if is_pinned else tensor).to(device, non_blocking=is_pinned)
