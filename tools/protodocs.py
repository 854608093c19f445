"""The reference of every call and message, from the protos and their comments: `python -m tools.protodocs OUT.md`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

from tools.genproto import PACKAGE, PROTOC_PINS, PROTOS, run_environment

# Numbers of the fields of a FileDescriptorProto and of what it holds, as paths of comments name them
# (google/protobuf/descriptor.proto).
SYNTAX, MESSAGES, ENUMS, SERVICES = 12, 4, 5, 6
FIELDS, VALUES, METHODS = 2, 2, 2
Comments = dict[tuple[int, ...], str]


def main(arguments: Sequence[str]) -> None:
    """Write the reference to the file named."""
    if len(arguments) != 1:
        raise SystemExit("usage: python -m tools.protodocs OUT.md")
    Path(arguments[0]).write_text(reference(read_protos()))


def read_protos() -> list[FileDescriptorProto]:
    """Our own protos, with comments; those with services first."""
    with tempfile.TemporaryDirectory(prefix="protodocs-") as directory:
        out = Path(directory) / "set.binpb"
        run_environment(
            "grpcio-tools",
            PROTOC_PINS,
            "-m",
            "grpc_tools.protoc",
            f"--proto_path={PROTOS}",
            "--include_source_info",
            f"--descriptor_set_out={out}",
            *(str(path) for path in sorted((PROTOS / PACKAGE).glob("*.proto"))),
        )
        files = FileDescriptorSet.FromString(out.read_bytes()).file
    return sorted(files, key=lambda file: not file.service)


def reference(files: list[FileDescriptorProto]) -> str:
    """Markdown: a chapter a file; its calls in a table, then its messages, each with a table of its fields."""
    lines = ["# Calls and messages", "", "Generated from `proto/kvcache/v1`. Refusals: [Errors](../errors.md).", ""]
    for file in files:
        lines += _chapter(file)
    return "\n".join(lines).rstrip() + "\n"


def _chapter(file: FileDescriptorProto) -> Iterator[str]:
    comments = {tuple(each.path): _one_line(each.leading_comments) for each in file.source_code_info.location}
    yield from (f"## {Path(file.name).name}", "")
    if comments.get((SYNTAX,)):
        yield from (comments[SYNTAX,], "")
    for index, service in enumerate(file.service):
        yield from _service(service, comments, (SERVICES, index))
    for index, message in enumerate(file.message_type):
        yield from _message(message, comments, (MESSAGES, index))
    for index, enum in enumerate(file.enum_type):
        yield from _enum(enum, comments, (ENUMS, index))


def _service(service: ServiceDescriptorProto, comments: Comments, path: tuple[int, ...]) -> Iterator[str]:
    yield from (f"### {service.name}", "")
    if comments.get(path):
        yield from (comments[path], "")
    yield from ("| call | takes | answers | |", "| --- | --- | --- | --- |")
    for index, method in enumerate(service.method):
        takes = ("stream of " if method.client_streaming else "") + _linked(method.input_type)
        answers = ("stream of " if method.server_streaming else "") + _linked(method.output_type)
        yield f"| `{method.name}` | {takes} | {answers} | {comments.get((*path, METHODS, index), '')} |"
    yield ""


def _message(message: DescriptorProto, comments: Comments, path: tuple[int, ...]) -> Iterator[str]:
    yield from (f"({message.name.lower()})=", f"### {message.name}", "")
    if comments.get(path):
        yield from (comments[path], "")
    if not message.field:
        yield from ("No fields.", "")
        return
    yield from ("| field | | type | |", "| --- | --- | --- | --- |")
    pairs = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    for index, field in enumerate(message.field):
        told = comments.get((*path, FIELDS, index), "")
        if field.HasField("oneof_index") and not field.proto3_optional:
            told = f"one of `{message.oneof_decl[field.oneof_index].name}`. {told}".rstrip()
        yield f"| `{field.name}` | {field.number} | {_type(field, pairs)} | {told} |"
    yield ""


def _enum(enum: EnumDescriptorProto, comments: Comments, path: tuple[int, ...]) -> Iterator[str]:
    yield from (f"({enum.name.lower()})=", f"### {enum.name}", "")
    if comments.get(path):
        yield from (comments[path], "")
    yield from ("| value | | |", "| --- | --- | --- |")
    for index, value in enumerate(enum.value):
        yield f"| `{value.name}` | {value.number} | {comments.get((*path, VALUES, index), '')} |"
    yield ""


def _type(field: FieldDescriptorProto, pairs: dict[str, DescriptorProto]) -> str:
    pair = pairs.get(field.type_name.rpartition(".")[2])
    if pair is not None:
        return f"map of {_type(pair.field[0], {})} to {_type(pair.field[1], {})}"
    name = _linked(field.type_name) if field.type_name else FieldDescriptorProto.Type.Name(field.type)[5:].lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if field.proto3_optional else name


def _linked(type_name: str) -> str:
    name = type_name.rpartition(".")[2]
    return f"[{name}](#{name.lower()})"


def _one_line(comment: str) -> str:
    return " ".join(comment.split()).replace("|", "\\|")


if __name__ == "__main__":
    main(sys.argv[1:])
