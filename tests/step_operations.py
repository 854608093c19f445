"""Converts the columns of a step to the operations that they stand for, and back: the oracle for columns."""

from __future__ import annotations

from typing import Any

from kvcache.v1 import cache_pb2

from cachesvc.wire.columns import IN_ORDER, ODD, OPERATION_NAMES, Column, pack_answer, plain_number, read_columns


def without_columns(request: cache_pb2.StepRequest, groups: int) -> cache_pb2.StepRequest:
    """The same step, its entries as operations before the others."""
    columns = read_columns(request.columns, groups)
    plain = cache_pb2.StepRequest()
    for column in IN_ORDER:
        for entry in range(len(columns.sequences(column))):
            fields: dict[str, Any] = {OPERATION_NAMES[column]: columns.operation(column, entry)}
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
    pack_answer(told, answer)
    del response.results[: sum(counts.values())]
    return response
