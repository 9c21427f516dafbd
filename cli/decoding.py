"""Decodes the records of internal topics: the fields of their keys and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from fencepost.logcore.batch import LogRecord

Decoder = Callable[["LogRecord"], Mapping[str, object] | None]
"""Returns a record's fields; None for a kind that is not known. Raises InvalidRecordError."""


def decoder_of(topic: str) -> Decoder | None:
    """Return the decoder for the records of an internal topic; None for any other topic."""
    return {
        "__consumer_offsets": _decode_group,
        "__transaction_state": _decode_txn,
        "__share_group_state": _decode_share_state,
        "__cluster_metadata": _decode_metadata,
        "__fencepost_history": _decode_history,
    }.get(topic)


def decoder_of_file(path: Path) -> Decoder | None:
    """Return the decoder for the records of a file; a metadata snapshot may be in any directory."""
    if path.suffix == ".checkpoint":
        return _decode_metadata
    return decoder_of_directory(path.absolute().parent.name)


def decoder_of_directory(name: str) -> Decoder | None:
    """Return the decoder for the records of a partition, by the name of its directory."""
    return decoder_of(name.split(".", 1)[0].rpartition("-")[0])


def _decode_group(record: LogRecord) -> Mapping[str, object] | None:
    from fencepost.groups.records import decode
    from fencepost.logcore.machine import Record

    decoded = decode(Record(record.key or b"", record.value))
    if decoded is None:
        return None
    key, value = decoded
    row = _key_of_group(key)
    row["tombstone" if value is None else "value"] = True if value is None else _fields(value)
    return row


def _key_of_group(key: object) -> dict[str, object]:
    from fencepost.groups.consumer_records import PER_GROUP, ConsumerKey
    from fencepost.groups.consumer_records import ConsumerRecordType as Kind
    from fencepost.groups.share_records import PER_MEMBER, ShareKey

    match key:
        case ShareKey(kind, group_id, member_id) if kind in PER_MEMBER:
            fields = {"type": "ShareMember", "kind": kind, "group_id": group_id}
            return {**fields, "member_id": member_id}
        case ShareKey(kind, group_id):
            return {"type": "ShareGroup", "kind": kind, "group_id": group_id}
        case ConsumerKey(Kind.REGULAR_EXPRESSION, group_id, regex):
            return {"type": "RegularExpression", "group_id": group_id, "regex": regex}
        case ConsumerKey(kind, group_id) if kind in PER_GROUP:
            return {"type": "ConsumerGroup", "kind": kind, "group_id": group_id}
        case ConsumerKey(kind, group_id, member_id):
            fields = {"type": "ConsumerMember", "kind": kind, "group_id": group_id}
            return {**fields, "member_id": member_id}
    return {"type": type(key).__name__.removesuffix("Key"), **_fields(key)}


def _decode_share_state(record: LogRecord) -> Mapping[str, object] | None:
    from fencepost.groups.share.state_records import Update, decode
    from fencepost.logcore.machine import Record

    decoded = decode(Record(record.key or b"", record.value))
    if decoded is None:
        return None
    kind = "ShareUpdate" if isinstance(decoded.value, Update) else "ShareSnapshot"
    row: dict[str, object] = {"type": kind, **_fields(decoded.key)}
    row["tombstone" if decoded.value is None else "value"] = (
        True if decoded.value is None else _fields(decoded.value)
    )
    return row


def _decode_txn(record: LogRecord) -> Mapping[str, object] | None:
    from fencepost.logcore.machine import Record
    from fencepost.txn.records import decode

    decoded = decode(Record(record.key or b"", record.value))
    if decoded is None:
        return None
    row: dict[str, object] = {"transactional_id": decoded.transactional_id}
    if decoded.txn is None:
        row["tombstone"] = True
    else:
        row["value"] = _fields(decoded.txn) | {"state": decoded.txn.state.name}
    return row


def _decode_metadata(record: LogRecord) -> Mapping[str, object] | None:
    """Decode a record; only records of older Fencepost releases have a key."""
    from fencepost.coordinator.metadata.control_records import described_control
    from fencepost.coordinator.metadata.conversion import decode
    from fencepost.coordinator.metadata.errors import MetadataError
    from fencepost.logcore.errors import InvalidRecordError
    from fencepost.logcore.machine import Record

    if record.key is None:
        from fencepost.cluster.record_json import described

        return None if record.value is None else described(record.value)
    if record.key.startswith(b"\0"):
        return described_control(record)
    try:
        kind, name, value = decode(Record(record.key, record.value))
    except MetadataError as error:
        raise InvalidRecordError(str(error)) from error
    row: dict[str, object] = {"type": kind, "name": name}
    row["tombstone" if value is None else "value"] = True if value is None else value
    return row


def _decode_history(record: LogRecord) -> Mapping[str, object] | None:
    from fencepost.coordinator.history.entries import decode_value
    from fencepost.logcore.errors import InvalidRecordError

    try:
        entry = decode_value(record.value) if record.value is not None else None
    except ValueError as error:
        raise InvalidRecordError(str(error)) from error
    return None if entry is None else _fields(entry)


def _fields(value: object) -> dict[str, object]:
    """Return the fields of a dataclass instance or named tuple, by name."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        named: dict[str, object] = value._asdict()
        return named
    if not dataclasses.is_dataclass(value):
        return {"value": value}
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def plain(value: object) -> object:
    """Convert a value for JSON; bytes become text if they are printable, or else hexadecimal."""
    if isinstance(value, bytes):
        text = value.decode(errors="replace")
        return text if text.isprintable() and "\ufffd" not in text else f"0x{value.hex()}"
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(_fields(value))
    return value
