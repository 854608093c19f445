"""``cachesvc describe``: what a running daemon says of its own services and messages, by server reflection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool

from cachesvc_ctl.core.command import DaemonCommand, MissingExtraError, flag

TYPES = {getattr(FieldDescriptor, name): name[5:].lower() for name in dir(FieldDescriptor) if name.startswith("TYPE_")}


class UnknownSymbol(Exception):
    """The daemon has no service, method, message or enum of that name."""

    def __init__(self, symbol: str) -> None:
        super().__init__(symbol)
        self.symbol = symbol

    def __str__(self) -> str:
        return f"the daemon knows no {self.symbol}; cachesvc describe lists its services"


class Describe(DaemonCommand):
    name = "describe"
    about = "services and messages as the running daemon describes them"
    flags = (
        flag(
            "symbol",
            nargs="?",
            default="",
            help="such as kvcache.v1.AdminService (default: list services)",
        ),
    )

    def run(self) -> int:
        """Print a description from the daemon's reflection. Raises MissingExtraError, UnknownSymbol."""
        try:
            from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
        except ImportError as error:
            raise MissingExtraError("grpc_reflection", "server", "cachesvc describe") from error
        with self.target.open() as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            if self.arguments.symbol:
                print("\n".join(describe(DescriptorPool(database), self.arguments.symbol)))
            else:
                print("\n".join(sorted(database.get_services())))
        return 0


def describe(pool: DescriptorPool, symbol: str) -> Iterator[str]:
    """Lines of one symbol in the language of protos. Raises UnknownSymbol."""
    for find, lines in (
        (pool.FindServiceByName, _service),
        (pool.FindMessageTypeByName, _message),
        (pool.FindEnumTypeByName, _enum),
    ):
        try:
            found: Any = find(symbol)
        except KeyError:
            continue
        yield from lines(found)
        return
    raise UnknownSymbol(symbol)


def _service(service: ServiceDescriptor) -> Iterator[str]:
    yield f"service {service.name} {{"
    for method in service.methods:
        asked = ("stream " if method.client_streaming else "") + method.input_type.full_name
        told = ("stream " if method.server_streaming else "") + method.output_type.full_name
        yield f"  rpc {method.name}({asked}) returns ({told});"
    yield "}"


def _message(message: Descriptor) -> Iterator[str]:
    yield f"message {message.name} {{"
    for field in message.fields:
        kind = _kind(field)
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
            yield f"  map<{_kind(key)}, {_kind(value)}> {field.name} = {field.number};"
            continue
        repeated = "repeated " if field.is_repeated else ""
        within = f" // one of {field.containing_oneof.name}" if field.containing_oneof is not None else ""
        yield f"  {repeated}{kind} {field.name} = {field.number};{within}"
    yield "}"


def _kind(field: FieldDescriptor) -> str:
    named = field.message_type or field.enum_type
    return str(named.full_name) if named is not None else TYPES[field.type]


def _enum(enum: EnumDescriptor) -> Iterator[str]:
    yield f"enum {enum.name} {{"
    for value in enum.values:
        yield f"  {value.name} = {value.number};"
    yield "}"
