"""Metadata records as JSON, in the form that Apache Kafka's tools print.

Source: ``MetadataRecordJsonConverters``, and the generated converter of each record type.
"""

from __future__ import annotations

import re
from base64 import b64encode, urlsafe_b64encode
from dataclasses import fields, is_dataclass
from typing import Any
from uuid import UUID

from fencepost.cluster.record_codec import Structure, decode_framed

_WORDS = re.compile(r"(?<!^)(?=[A-Z])")


def described(value: bytes) -> dict[str, Any]:
    """Return the type, version and fields of a record's value. Raises CorruptRecordError.

    A tagged field with its default is omitted.
    """
    record, version, structure = decode_framed(value)
    name = _WORDS.sub("_", type(record).__name__).upper()
    return {"type": name, "version": version, "data": _fields(record, structure)}


def _fields(record: object, structure: Structure) -> dict[str, Any]:
    shown = {_camel(step.name): _plain(getattr(record, step.name)) for step in structure.plain}
    for step in structure.tagged.values():
        value = getattr(record, step.name)
        if value != step.default:
            shown[_camel(step.name)] = _plain(value)
    return shown


def _camel(name: str) -> str:
    first, *more = name.split("_")
    return first + "".join(map(str.capitalize, more))


def _plain(value: Any) -> Any:
    if isinstance(value, UUID):
        return urlsafe_b64encode(value.bytes).decode().rstrip("=")
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        return {_camel(field.name): _plain(getattr(value, field.name)) for field in fields(value)}
    return value
