"""Hybrid models for simulations: what a model keeps beside the KV of full attention, by name or from a JSON file.

A file has one object with the fields of ``HybridModel`` but for ``name``; sizes in bytes, distances in tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

MAX_FILE_BYTES = 1 << 20
MAX_PAGES = 12
"""Pages of a state, or windowed pages of a block, that a layout has groups for."""


class Copies(NamedTuple):
    """See ``cachesvc.simulation``: pages of the size of a trace's block, and distances in its blocks."""

    state_pages: int
    state_blocks: int
    window_pages: int
    window_blocks: int


NO_COPIES = Copies(0, 1, 0, 1)


class HybridRejected(Exception):
    """A hybrid model cannot be simulated; the message says what to do."""


@dataclass(frozen=True, slots=True)
class HybridModel:
    """``kv_bytes``: of a token in full attention. ``state_bytes``: of one recurrent state, which the engine offers
    every ``state_tokens`` tokens. ``window_bytes``: of a token in layers with a window of ``window_tokens``."""

    name: str
    kv_bytes: int
    state_bytes: int = 0
    state_tokens: int = 0
    window_bytes: int = 0
    window_tokens: int = 0

    def copies(self, block_tokens: int) -> Copies:
        """Pages and distances for a trace with blocks of that size. Raises HybridRejected."""
        states = -(-self.state_bytes // (self.kv_bytes * block_tokens))
        windows = -(-self.window_bytes // self.kv_bytes)
        if max(states, windows) > MAX_PAGES:
            raise HybridRejected(
                f"{self.name}: a state takes {states} blocks of {block_tokens} tokens and a block {windows} windowed "
                f"pages; at most {MAX_PAGES} can be simulated: take a trace with larger blocks"
            )
        between = max(1, round(self.state_tokens / block_tokens)) if states else 1
        return Copies(states, between, windows, max(1, -(-self.window_tokens // block_tokens)))


HYBRID_MODELS = {
    model.name: model
    for model in (
        HybridModel("qwen3-next", kv_bytes=24 << 10, state_bytes=36 << 20, state_tokens=1536),
        HybridModel("gemma-3", kv_bytes=80 << 10, window_bytes=416 << 10, window_tokens=1024),
    )
}
"""Qwen3-Next 80B: 12 layers of full attention, 36 of gated delta rule. Gemma 3 27B: 10 layers of full attention, 52
with a window. Both in bfloat16, all ranks together."""


def hybrid_model(text: str) -> HybridModel:
    """The model of that name, or of a file that ends in ``.json``. Raises HybridRejected."""
    known = HYBRID_MODELS.get(text)
    if known is not None:
        return known
    if not text.endswith(".json"):
        raise HybridRejected(f"there is no layout {text!r}; choose {', '.join(HYBRID_MODELS)} or name a .json file")
    path = Path(text)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise HybridRejected(f"{path} has more than {MAX_FILE_BYTES} bytes: that is no layout")
        said = json.loads(path.read_bytes())
    except OSError as error:
        raise HybridRejected(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise HybridRejected(f"{path} is no JSON: {error}") from error
    return _checked(path.stem, said)


def _checked(name: str, said: object) -> HybridModel:
    known = [field.name for field in fields(HybridModel) if field.name != "name"]
    if not isinstance(said, Mapping) or not all(key in known for key in said):
        raise HybridRejected(f"layout {name}: give one object with the fields {', '.join(known)} alone")
    for key, value in said.items():
        if type(value) is not int or not 0 <= value < 1 << 62:
            raise HybridRejected(
                f"layout {name}: {key} is {value!r:.40}; give a whole number of bytes or tokens from 0"
            )
    model = HybridModel(name, **{"kv_bytes": 0, **said})
    if not model.kv_bytes or not (model.state_bytes or model.window_bytes):
        raise HybridRejected(f"layout {name}: kv_bytes and one of state_bytes and window_bytes must be above 0")
    if bool(model.state_bytes) != bool(model.state_tokens) or bool(model.window_bytes) != bool(model.window_tokens):
        raise HybridRejected(f"layout {name}: state_bytes goes with state_tokens, window_bytes with window_tokens")
    return model
