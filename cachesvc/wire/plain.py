"""Messages as dicts, lists and values, for JSON: every field, always, under the name and the type of the proto.

So ``.leases[]`` is there when no lease is, a count of 0 is 0, and 64-bit numbers are numbers. Bytes are hexadecimal,
enums are names, and a message or optional field that is not set is null.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message


def plain(message: Message) -> dict[str, Any]:
    """The message as dicts, lists and values."""
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        of = entry.fields_by_name["value"]
        return {key: _value(of, value[key]) for key in sorted(value)}
    if field.is_repeated:
        return [_value(field, each) for each in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _value(field, value)


def _value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    return value.hex() if isinstance(value, bytes) else value
