"""Messages of Kafka's protocol as JSON objects, with the field names of kio.

Durations and times are milliseconds, bytes are base64, UUIDs are text, and errors have Kafka's
names. Fields with their default value are left out.
"""

from __future__ import annotations

import base64
import datetime as dt
import uuid
from typing import Any, Final

from kio.schema.errors import ErrorCode

from fencepost.protocol.schema import Entity, FieldInfo, Side, all_fields, message_class
from fencepost.protocol.writer import duration_ms, time_ms

_CODES: Final = {code.name.upper(): code for code in ErrorCode}
_TEXTS: Final = frozenset({"string", "uuid", "bytes", "records", "error_code"})


def as_json(message: Entity) -> dict[str, Any]:
    """Return the fields of ``message`` that differ from Kafka's defaults."""
    fields = {}
    for info in all_fields(type(message)):
        value = getattr(message, info.name)
        if value != info.default:
            fields[info.name] = _plain(info, value)
    return fields


def _plain(info: FieldInfo, value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(info, item) for item in value]
    if value is None or isinstance(value, (bool, str, float)):
        return value
    if info.struct is not None:
        return as_json(value)
    if isinstance(value, ErrorCode):
        return value.name.upper()
    if isinstance(value, dt.timedelta):
        return duration_ms(value)
    if isinstance(value, dt.datetime):
        return time_ms(value)
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, (bytes, memoryview)):
        return base64.b64encode(value).decode()
    return int(value)


def from_json(api_key: int, version: int, side: Side, values: Any) -> Entity:
    """Build a message from :func:`as_json`'s object. Raises ValueError naming the field."""
    return _build_struct(message_class(api_key, version, side), values, side)


def _build_struct(cls: type, values: Any, where: str) -> Entity:
    if type(values) is not dict:
        raise ValueError(f"{where} is a {type(values).__name__}, not an object")
    infos = {info.name: info for info in all_fields(cls)}
    unknown = sorted(values.keys() - infos.keys())
    if unknown:
        raise ValueError(f"{where} has no field {unknown[0][:100]!r}")
    return cls(
        **{
            name: _field(info, values[name], f"{where}.{name}") if name in values else info.default
            for name, info in infos.items()
        }
    )


def _field(info: FieldInfo, value: Any, where: str) -> Any:
    if not info.is_array:
        return _element(info, value, where)
    if value is None:
        return None
    if type(value) is not list:
        raise ValueError(f"{where} is a {type(value).__name__}, not an array")
    return tuple(_element(info, item, f"{where}[{at}]") for at, item in enumerate(value))


def _element(info: FieldInfo, value: Any, where: str) -> Any:
    if value is None:
        if info.nullable or info.kafka_type in {"uuid", "datetime_i64"}:
            return None
        raise ValueError(f"{where} is null")
    if info.struct is not None:
        return _build_struct(info.struct, value, where)
    kind = str if info.kafka_type in _TEXTS else bool if info.kafka_type == "bool" else int
    if type(value) is not kind and not (info.kafka_type == "float64" and type(value) is float):
        raise ValueError(f"{where} is {str(value)[:100]!r}, not a {kind.__name__}")
    try:
        return _converted(info.kafka_type, value)
    except (ValueError, KeyError, OverflowError) as error:
        raise ValueError(f"{where} is {str(value)[:100]!r}, not a {info.kafka_type}") from error


def _converted(kafka_type: str | None, value: Any) -> Any:
    match kafka_type:
        case "uuid":
            return uuid.UUID(value)
        case "bytes" | "records":
            return base64.b64decode(value, validate=True)
        case "error_code":
            return _CODES[value]
        case "timedelta_i32" | "timedelta_i64":
            return dt.timedelta(milliseconds=value)
        case "datetime_i64":
            return dt.datetime.fromtimestamp(value / 1000, dt.UTC)
    return value
