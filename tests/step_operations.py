"""Converts the columns of a step to the operations that they stand for, and back: the oracle for columns."""

from __future__ import annotations

from array import array
from typing import Any

from kvcache.v1 import cache_pb2

from cachesvc.wire.columns import ANSWER_FIELDS, IN_ORDER, ODD, OPERATION_NAMES, Column, plain_number, read_columns


def without_columns(request: cache_pb2.StepRequest, groups: int) -> cache_pb2.StepRequest:
    """Convert a step: its entries become operations before the others."""
    plain = cache_pb2.StepRequest()
    for lot in read_columns(request.columns, groups):
        for entry in range(len(lot.data[0])):
            fields: dict[str, Any] = {OPERATION_NAMES[lot.column]: lot.operation(entry)}
            plain.operations.add(**fields)
    plain.MergeFrom(request)
    plain.ClearField("columns")
    return plain


def with_columns(response: cache_pb2.StepResponse, request: cache_pb2.StepRequest) -> cache_pb2.StepResponse:
    """The answer to ``without_columns(request)`` as the one to ``request``."""
    message = request.columns
    counts = {
        column: len(ids) >> 3
        for column, ids in zip(
            IN_ORDER,
            (message.grow_sequences, message.publish_sequences, message.recycle_sequences, message.release_sequences),
            strict=True,
        )
    }
    told: dict[Column, list[int]] = {column: [] for column in IN_ORDER}
    answer, results = response.columns, iter(response.results)
    for column, count in counts.items():
        for (index, _), result in zip(enumerate(range(count)), results, strict=False):
            name = OPERATION_NAMES[column]
            is_known = result.WhichOneof("result") == name
            number = plain_number(column, getattr(result, name)) if is_known else None
            told[column].append(ODD if number is None else number)
            if number is None:
                answer.odd.add(column=column, index=index, result=result)
    for column, numbers in told.items():
        if numbers:
            setattr(answer, ANSWER_FIELDS[column], array("I", numbers).tobytes())
    del response.results[: sum(counts.values())]
    return response
