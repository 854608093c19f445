"""``cachesvc layout``: what a model's cache looks like and how much of it fits, out of its config.json alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from cachesvc_client.core.errors import InvalidRequest
from cachesvc_client.layouts.families import padding_bytes
from cachesvc_client.layouts.hf_config import AUTO, HeadWindows, layout_of_config

from cachesvc.model.layout import Layout, device_bytes
from cachesvc.model.text import parse_size
from cachesvc_ctl.check import ACTIVATION_BYTES, POOL_STEP_BYTES, Memory, Plan, remedy, weights_beside
from cachesvc_ctl.core.command import Command, Table, describe_bytes, flag, table

MAX_SEQUENCE_TOKENS = 1 << 31
MAX_CONFIG_BYTES = 16 << 20
STATES = 2
PLANNED_TOKENS = 32768
"""Length of the requests that a plan counts, unless --sequence-tokens says another."""


@dataclass(frozen=True, slots=True)
class PlaneRow:
    """Planes of one name and shape in one group."""

    group: str
    plane: str
    layers: tuple[int, ...]
    page_shape: tuple[int, ...]
    dtype: str
    page_bytes: int


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group's rule, and the bytes of one block in it."""

    group: str
    window_tokens: int | None
    sink_tokens: int
    replicated: bool
    is_state: bool
    rank_block_bytes: int
    device_block_bytes: int
    host_block_bytes: int


@dataclass(frozen=True, slots=True)
class Fit:
    """Capacity of one rank's device memory: ``count`` times ``unit_pages[g]`` pages of each group. ``pages``: of each
    group's pool."""

    count: int
    unit_pages: tuple[int, ...]
    pages: tuple[int, ...]
    used_bytes: int


class LayoutOfModel(Command):
    """Compute a layout from a config.json, without a daemon."""

    name = "layout"
    about = "what a model's cache takes and what fits, from its config.json"
    flags = (
        flag("config", metavar="CONFIG", help="a config.json, or the folder that has it"),
        flag("--tp", type=int, default=1, metavar="N", help="ranks of tensor parallelism (default 1)"),
        flag("--block-tokens", type=int, default=64, metavar="N", help="tokens of a block (default 64)"),
        flag(
            "--kv-dtype", default=AUTO, metavar="D", help="bfloat16, float16, fp8, int8, ... (default: the model's own)"
        ),
        flag("--scale-dtype", metavar="D", help="a scale for each head and token beside values of one byte"),
        flag("--mtp", action="store_true", help="with the model's next-token-prediction layers"),
        flag("--window-heads", metavar="FILE", help="JSON: for each layer true or false for each kv head, its window"),
        flag("--window-tokens", type=int, metavar="N", help="window of --window-heads"),
        flag(
            "--sink-tokens", type=int, default=0, metavar="N", help="first tokens that --window-heads keep (default 0)"
        ),
        flag("--memory", metavar="SIZE", help="device memory of one rank for the cache, e.g. 40GiB"),
        flag("--sequence-tokens", type=int, metavar="N", help="length of the sequences that are to fit into --memory"),
        flag("--assume", choices=("gqa",), help="take an unknown model type's layers as plain grouped-query attention"),
        flag("--gpu-memory", metavar="SIZE", help="memory of a GPU, e.g. 80GiB: print a plan with pools and flags"),
        flag("--weights", metavar="SIZE", help="weights of all ranks, for the plan (default: the files beside CONFIG)"),
        flag("--activations", metavar="SIZE", help="activations and graphs on a GPU, for the plan (default 4GiB)"),
        flag("--json", action="store_true", help="print everything as JSON"),
    )

    def run(self) -> int:
        """Raises LayoutRejected (of hf_config) and InvalidRequest."""
        memory_bytes = None if self.arguments.memory is None else parse_size(self.arguments.memory)
        tokens = self.arguments.sequence_tokens
        if tokens is not None and not 1 <= tokens <= MAX_SEQUENCE_TOKENS:
            raise InvalidRequest(f"--sequence-tokens must be in 1..{MAX_SEQUENCE_TOKENS}, got {tokens}")
        if tokens is not None and memory_bytes is None and self.arguments.gpu_memory is None:
            raise InvalidRequest("--sequence-tokens says how many sequences fit: give --memory or --gpu-memory too")
        config = read_config(Path(self.arguments.config))
        heads = read_heads(self.arguments.window_heads, self.arguments.window_tokens, self.arguments.sink_tokens)
        layout = layout_of_config(
            config,
            block_tokens=self.arguments.block_tokens,
            tensor_parallel=self.arguments.tp,
            kv_dtype=self.arguments.kv_dtype,
            scale_dtype=self.arguments.scale_dtype,
            mtp=self.arguments.mtp,
            heads=heads,
            assume=self.arguments.assume,
        )
        plan = self._plan(layout, tokens)
        padding = padding_bytes(layout, heads.marks) if heads is not None else (0,) * len(layout.groups)
        if memory_bytes is not None and fit(layout, block_pages(layout), memory_bytes).count == 0:
            needed = device_bytes(layout, block_pages(layout))
            raise InvalidRequest(
                f"--memory {self.arguments.memory} holds no block: one takes {needed:,} bytes on each rank"
            )
        if self.arguments.json:
            document = as_json(config["model_type"], layout, padding, memory_bytes, tokens)
            print(json.dumps(document if plan is None else document | {"plan": plan.as_json()}, indent=2))
        else:
            print(describe(config["model_type"], layout, padding, memory_bytes, tokens))
            print("" if plan is None else "\n" + plan.describe())
        return 0

    def _plan(self, layout: Layout, tokens: int | None) -> Plan | None:
        """Plan for a GPU, where one is named. Raises InvalidRequest where nothing is left for a pool."""
        said = self.arguments
        if said.gpu_memory is None:
            return None
        weights = weights_beside(Path(said.config)) if said.weights is None else parse_size(said.weights)
        if not weights:
            raise InvalidRequest("there are no weights beside the config.json: say --weights SIZE, such as 16GiB")
        activations = ACTIVATION_BYTES if said.activations is None else parse_size(said.activations)
        memory = Memory(parse_size(said.gpu_memory), weights, activations)
        if memory.pool(layout.ranks) < device_bytes(layout, block_pages(layout)):
            raise InvalidRequest(
                f"weights of {describe_bytes(weights)} on {layout.ranks} GPUs of {said.gpu_memory} leave no pool; try "
                f"{remedy(memory, layout.ranks)}"
            )
        pool_bytes = memory.pool(layout.ranks) // POOL_STEP_BYTES * POOL_STEP_BYTES
        blocks = fit(layout, block_pages(layout), pool_bytes)
        kv_bytes = sum(blocks.pages[pool[0]] * max(map(layout.page_bytes, pool)) for pool in layout.pools)
        tokens = tokens or PLANNED_TOKENS
        requests = fit(layout, sequence_pages(layout, tokens), pool_bytes).count
        held_tokens = blocks.count * layout.block_tokens
        return Plan(layout.ranks, memory, pool_bytes, kv_bytes, held_tokens, tokens, requests)


def read_config(path: Path) -> dict[str, Any]:
    """The object in a config.json, or in the one of a folder. Raises InvalidRequest."""
    path = path / "config.json" if path.is_dir() else path
    config = _read_json(path)
    if not isinstance(config, dict):
        raise InvalidRequest(f"{path} holds no JSON object")
    return config


def _read_json(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise InvalidRequest(f"{path} has more than {describe_bytes(MAX_CONFIG_BYTES)}: that is no config.json")
        return json.loads(path.read_bytes())
    except OSError as error:
        hint = "; CONFIG is a local file: download the model's config.json first" if not path.exists() else ""
        raise InvalidRequest(f"cannot read {path}: {error.strerror}{hint}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is no JSON: {error}") from error


def read_heads(path: str | None, window_tokens: int | None, sink_tokens: int) -> HeadWindows | None:
    """Windows head by head, where a file says so. Raises InvalidRequest."""
    if path is None:
        if window_tokens is not None or sink_tokens:
            raise InvalidRequest("--window-tokens and --sink-tokens are those of --window-heads: give it too")
        return None
    if window_tokens is None:
        raise InvalidRequest("--window-heads says which heads have a window: give --window-tokens too")
    marks = _read_json(Path(path))
    if not isinstance(marks, list) or not all(
        isinstance(layer, list) and all(isinstance(mark, bool) for mark in layer) for layer in marks
    ):
        raise InvalidRequest(f"{path} must hold a list for each layer, of true or false for each kv head")
    return HeadWindows(marks, window_tokens, sink_tokens)


def plane_rows(layout: Layout) -> list[PlaneRow]:
    """Planes by group, name and shape, in the layout's order."""
    found: dict[tuple[str, str, tuple[int, ...], str, int], list[int]] = {}
    for plane in sorted(layout.planes, key=lambda plane: layout.group_index[plane.group]):
        kind = (plane.group, plane.name, plane.page_shape, plane.dtype, plane.page_bytes)
        found.setdefault(kind, []).append(plane.layer)
    return [
        PlaneRow(group, name, tuple(sorted(layers)), shape, dtype, page_bytes)
        for (group, name, shape, dtype, page_bytes), layers in found.items()
    ]


def group_rows(layout: Layout) -> list[GroupRow]:
    return [
        GroupRow(
            group.name,
            group.window_tokens,
            group.sink_tokens,
            group.replicated,
            group.is_state,
            layout.page_bytes(index),
            layout.page_bytes(index) * layout.ranks,
            layout.page_bytes(index) * layout.host_ranks(index),
        )
        for index, group in enumerate(layout.groups)
    ]


def block_pages(layout: Layout) -> tuple[int, ...]:
    """Pages of a block that is kept in every group; of states, which few blocks have, none."""
    return tuple(int(not group.is_state) for group in layout.groups)


def sequence_pages(layout: Layout, tokens: int) -> tuple[int, ...]:
    """Pages of a sequence of that length while it decodes: all of a full group, sinks and window of the others, and the
    states at the end of its prompt and of what is computed."""
    blocks = -(-tokens // layout.block_tokens)
    return tuple(
        min(blocks, STATES)
        if group.is_state
        else blocks
        if group.window_tokens is None
        else min(blocks, layout.sink_blocks(index) + layout.window_blocks(index))
        for index, group in enumerate(layout.groups)
    )


def fit(layout: Layout, unit_pages: tuple[int, ...], memory_bytes: int) -> Fit:
    """The most units whose device slabs, alignment included, take no more than ``memory_bytes``."""

    of_pool = {group: sum(unit_pages[each] for each in pool) for pool in layout.pools for group in pool}

    def pages(count: int) -> tuple[int, ...]:
        return tuple(count * of_pool[group] for group in range(len(unit_pages)))

    unit_bytes = sum(layout.page_bytes(group) * unit for group, unit in enumerate(unit_pages))
    low, high = 0, memory_bytes // unit_bytes
    while low < high:
        middle = (low + high + 1) // 2
        if device_bytes(layout, pages(middle)) <= memory_bytes:
            low = middle
        else:
            high = middle - 1
    return Fit(low, unit_pages, pages(low), device_bytes(layout, pages(low)))


def as_json(
    model_type: str, layout: Layout, padding: Sequence[int], memory_bytes: int | None, tokens: int | None
) -> dict[str, Any]:
    """Everything that ``describe`` says; the keys are a promise to scripts. ``padding``: of ``padding_bytes``."""
    groups = group_rows(layout)
    document: dict[str, Any] = {
        "model_type": model_type,
        "layers": layout.layers,
        "ranks": layout.ranks,
        "block_tokens": layout.block_tokens,
        "fingerprint": layout.fingerprint.hex(),
        "planes": [asdict(row) for row in plane_rows(layout)],
        "groups": [asdict(row) for row in groups],
        "block_bytes": {
            "rank": sum(row.rank_block_bytes for row in groups),
            "devices": sum(row.device_block_bytes for row in groups),
            "host": sum(row.host_block_bytes for row in groups),
        },
    }
    if any(padding):
        document["padding_bytes"] = dict(zip(layout.group_index, padding, strict=True))
    document["token_bytes"] = {
        where: block_bytes / layout.block_tokens for where, block_bytes in document["block_bytes"].items()
    }
    if memory_bytes is not None:
        document["memory_bytes"] = memory_bytes
        document["blocks"] = asdict(fit(layout, block_pages(layout), memory_bytes))
    if memory_bytes is not None and tokens is not None:
        document["sequence_tokens"] = tokens
        document["sequences"] = asdict(fit(layout, sequence_pages(layout, tokens), memory_bytes))
    return document


def describe(
    model_type: str, layout: Layout, padding: Sequence[int], memory_bytes: int | None, tokens: int | None
) -> str:
    rows = group_rows(layout)
    ranks = "1 rank" if layout.ranks == 1 else f"{layout.ranks} ranks"
    fingerprint = layout.fingerprint.hex()[:12]
    parts = [
        f"{model_type}: {layout.layers} layers, {ranks}, blocks of {layout.block_tokens} tokens, layout {fingerprint}",
        PLANES.text(plane_rows(layout)),
        GROUPS.text(rows),
        _bytes_table(layout, rows),
    ]
    if any(padding):
        parts.append(_padding_part(layout, padding, rows))
    if memory_bytes is not None:
        parts += _fit_parts(layout, memory_bytes, tokens)
    return "\n\n".join(parts)


PLANES = Table(
    "group | plane | layers=count | which | page shape=shape | dtype | bytes a page=page",
    count=lambda row: len(row.layers),
    which=lambda row: describe_layers(row.layers),
    shape=lambda row: " x ".join(map(str, row.page_shape)),
    page=lambda row: row.page_bytes,
)
GROUPS = Table(
    "group | window | sinks | on every rank=replicated | bytes a block, one rank=rank | all ranks=devices | host",
    window=lambda row: (
        "a state" if row.is_state else "none" if row.window_tokens is None else f"{row.window_tokens:,} tokens"
    ),
    sinks=lambda row: f"{row.sink_tokens:,} tokens" if row.sink_tokens else "none",
    replicated=lambda row: "the same bytes" if row.replicated else "its own heads",
    rank=lambda row: row.rank_block_bytes,
    devices=lambda row: row.device_block_bytes,
    host=lambda row: row.host_block_bytes,
)


def _bytes_table(layout: Layout, rows: Sequence[GroupRow]) -> str:
    block_bytes = (
        ("one rank", sum(row.rank_block_bytes for row in rows)),
        ("all ranks", sum(row.device_block_bytes for row in rows)),
        ("host", sum(row.host_block_bytes for row in rows)),
    )
    cells = [(where, whole // layout.block_tokens, whole, describe_bytes(whole)) for where, whole in block_bytes]
    return table(("in all groups", "bytes a token", "bytes a block", ""), cells)


def _padding_part(layout: Layout, padding: Sequence[int], rows: Sequence[GroupRow]) -> str:
    by_group = ", ".join(f"{wasted:,} in {name}" for name, wasted in zip(layout.group_index, padding, strict=True))
    whole = sum(row.device_block_bytes for row in rows)
    return (
        f"{sum(padding):,} of the {whole:,} bytes of a block on all ranks hold no head ({by_group}),\n"
        "for ranks have different numbers of windowed heads, and planes of one shape; even_window_heads takes fewer."
    )


def _fit_parts(layout: Layout, memory_bytes: int, tokens: int | None) -> list[str]:
    blocks = fit(layout, block_pages(layout), memory_bytes)
    text = (
        f"{describe_bytes(memory_bytes)} on each rank hold {blocks.count:,} blocks = "
        f"{blocks.count * layout.block_tokens:,} tokens that are kept in every group"
        f"{' but states' if layout.state_groups else ''}"
    )
    if tokens is not None:
        return [text, *_sequence_parts(layout, memory_bytes, tokens)]
    if layout.window_groups:
        text += "\n(windows take less while decoding: --sequence-tokens N counts sequences of that length)"
    return [text]


def _sequence_parts(layout: Layout, memory_bytes: int, tokens: int) -> list[str]:
    fitted = fit(layout, sequence_pages(layout, tokens), memory_bytes)
    text = f"or {fitted.count:,} sequences of {tokens:,} tokens while they decode"
    if layout.window_groups:
        whole = fit(layout, (max(fitted.unit_pages),) * len(layout.groups), memory_bytes)
        text += f" ({whole.count:,} if nothing fell out of the windows)"
    names = [group.name for group in layout.groups]
    cells = list(zip(names, fitted.unit_pages, fitted.pages, strict=True))
    return [text, table(("group", "pages a sequence", "pages in all"), cells)]


def describe_layers(layers: Sequence[int]) -> str:
    """Ascending layers in short: ``0-60``, ``0-22 by 2``, ``0-4, 6-10, ... 54-58, 60-61``."""
    steps = {after - before for before, after in pairwise(layers)}
    if len(layers) > 2 and len(steps) == 1 and steps != {1}:
        return f"{layers[0]}-{layers[-1]} by {steps.pop()}"
    starts = [i for i in range(len(layers)) if i == 0 or layers[i] != layers[i - 1] + 1]
    ends = [*(i - 1 for i in starts[1:]), len(layers) - 1]
    runs = [f"{layers[a]}" if a == b else f"{layers[a]}-{layers[b]}" for a, b in zip(starts, ends, strict=True)]
    return ", ".join(runs if len(runs) <= 5 else [*runs[:2], "... " + runs[-2], runs[-1]])
