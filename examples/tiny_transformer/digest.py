"""A model's digest for the cache's namespace: equal only where two engines would compute the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from examples.tiny_transformer.config import F32
from examples.tiny_transformer.model import TinyTransformer, make_planes
from examples.tiny_transformer.tokens import BYTE_COUNT

PROBE_BLOCKS = 3  # enough that attention reads pages besides its own; about 50 ms for the demo's models

# For the environment of an engine's process, before NumPy is imported, so that all engines round alike.
# OpenBLAS (0.3.31, Haswell kernels) sums in an order that depends on a row's place and on the number of rows:
# two threads share the rows out and give other last bits than one. One thread also keeps two engines from
# spinning for the same cores: a prefill of 0.6 s took 5.8 s with two threads on a busy machine of two cores.
ONE_BLAS_THREAD = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)


def digest_model(model: TinyTransformer) -> str:
    """SHA-256 over the config, every weight and the logits of a probe, in hex.

    The probe's logits stand for what the weights do not tell: the BLAS, its kernels and its threads. An
    engine that rounds differently gets another namespace and misses, rather than mix in bits that it would
    not compute.
    """
    digest = hashlib.sha256()
    parts = [repr(model.config).encode(), model.arrays.label.encode()]
    for name, array in (*_named_weights(model), ("probe", _probe_logits(model))):
        parts += [name.encode(), str(array.shape).encode(), array.tobytes()]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _named_weights(model: TinyTransformer) -> Iterator[tuple[str, F32]]:
    get = model.arrays.get
    yield "embedding", get(model.weights.embedding)
    for index, layer in enumerate(model.weights.layers):
        for name, array in layer.items():
            yield f"{index}.{name}", get(array)
    yield "final_gain", get(model.weights.final_gain)
    yield "unembedding", get(model.weights.unembedding)


def _probe_logits(model: TinyTransformer) -> F32:
    config = model.config
    tokens = np.arange(PROBE_BLOCKS * config.block_tokens, dtype=np.int32) % BYTE_COUNT
    planes = make_planes(model, PROBE_BLOCKS)
    tables = {group.name: np.arange(PROBE_BLOCKS, dtype=np.int32) for group in config.groups}
    return model.forward(tokens, 0, tables, planes, _wait_for_nothing)


def _wait_for_nothing(layer: int) -> None:
    """The probe's pages are its own."""
