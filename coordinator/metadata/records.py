"""The records of the metadata log: their layout, and what each does to the image.

The key names what changed, the value (msgpack) is its whole new state, a tombstone removes it. The
layout is our own.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack

from fencepost.coordinator.metadata.image import MetadataImage, Topic
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.logcore.machine import Record

RECORD_VERSION = 1
"""The layout of the values. A higher number is refused: it was written by a later release."""

TOPIC, SETTINGS, PRODUCER_IDS, STARTS = "topic", "broker-configs", "producer-ids", "starts"
FEATURE = "feature"
ACL, SCRAM, QUOTA, SECRET = "acl", "scram", "quota", "secret"
TABLES = frozenset({ACL, SCRAM, QUOTA, SECRET})
"""Kinds whose values others look into (``coordinator/security``)."""


class MetadataError(Exception):
    """The metadata log holds something that this release does not understand."""


def decode(record: Record) -> tuple[str, str, Mapping[str, Any] | None]:
    """Read a record of the log: what changed, its name, its new state or None.

    Raises MetadataError.
    """
    kind, name = unpack_key(record.key)
    return kind, name, None if record.value is None else _unpack(record.value)


def _key(kind: str, name: str = "") -> bytes:
    packed: bytes = msgpack.packb([kind, name])
    return packed


def unpack_key(key: bytes) -> tuple[str, str]:
    """What a record is about, and its name. Raises MetadataError."""
    try:
        kind, name = msgpack.unpackb(key)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MetadataError(f"{METADATA_TOPIC} holds a key that can not be read") from error
    return kind, name


def _pack(value: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb({"version": RECORD_VERSION, **value})
    return packed


def _unpack(raw: bytes) -> dict[str, Any]:
    try:
        value = msgpack.unpackb(raw)
    except (ValueError, msgpack.UnpackException) as error:
        raise MetadataError(f"{METADATA_TOPIC} holds a value that can not be read") from error
    if not isinstance(value, dict) or value.get("version") != RECORD_VERSION:
        raise MetadataError(f"{METADATA_TOPIC} holds a value of another version")
    return value


def topic_record(topic: Topic) -> Record:
    """A topic is as this says."""
    value = {
        "id": topic.topic_id.bytes,
        "partitions": topic.partitions,
        "configs": dict(topic.configs),
        "first_start": topic.first_start,
    }
    return Record(_key(TOPIC, topic.name), _pack(value))


def _topic_of(name: str, value: Mapping[str, Any]) -> Topic:
    try:
        return Topic(
            name,
            uuid.UUID(bytes=value["id"]),
            int(value["partitions"]),
            dict(value["configs"]),
            int(value["first_start"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise MetadataError(f"{METADATA_TOPIC}: the record of {name} lacks {error}") from error


def producer_ids_record(next_id: int) -> Record:
    """Every producer id below this may be in use."""
    return Record(_key(PRODUCER_IDS), _pack({"next": next_id}))


def starts_record(count: int) -> Record:
    """How often the broker was started."""
    return Record(_key(STARTS), _pack({"count": count}))


def feature_record(name: str, level: int, epoch: int) -> Record:
    """A feature's finalized level, and how often a level was changed."""
    return Record(_key(FEATURE, name), _pack({"level": level, "epoch": epoch}))


def topic_tombstone(name: str) -> Record:
    """A topic is gone."""
    return Record(_key(TOPIC, name), None)


def settings_record(scope: str, settings: Mapping[str, str]) -> Record:
    """Dynamic settings, as a whole; none are a tombstone."""
    value = _pack({"configs": dict(settings)}) if settings else None
    return Record(_key(SETTINGS, scope), value)


def table_record(kind: str, name: str, value: Mapping[str, Any] | None) -> Record:
    """An entry of one of :data:`TABLES`; None takes it away."""
    return Record(_key(kind, name), None if value is None else _pack(dict(value)))


def live_records(state: MetadataImage) -> Iterator[Record]:
    """The fewest records that add up to this state."""
    yield starts_record(state.starts)
    yield producer_ids_record(state.next_producer_id)
    for feature, level in state.levels.items():
        yield feature_record(feature, level, state.features_epoch)
    for scope, settings in state.settings.items():
        yield settings_record(scope, settings)
    for kind, table in state.tables.items():
        for name, value in table.items():
            yield table_record(kind, name, value)
    for topic in state.topics.values():
        yield topic_record(topic)


def apply(image: MetadataImage, record: Record) -> None:
    """Change the image as a record says. Raises MetadataError."""
    kind, name, value = decode(record)
    if kind == TOPIC:
        if value is None:
            image.remove(name)
        else:
            image.put(_topic_of(name, value))
    elif kind == SETTINGS:
        if value is None:
            image.settings.pop(name, None)
        else:
            image.settings[name] = dict(value["configs"])
    elif kind in TABLES:
        change_table(image, kind, {name: value})
    elif kind == FEATURE and value is not None:
        image.levels[name] = int(value["level"])
        image.features_epoch = int(value["epoch"])
    elif kind == PRODUCER_IDS and value is not None:
        image.next_producer_id = value["next"]
    elif kind == STARTS and value is not None:
        image.starts = value["count"]
    else:
        raise MetadataError(f"{METADATA_TOPIC} holds an unknown record {kind!r}")


def change_table(
    image: MetadataImage, kind: str, changes: Mapping[str, Mapping[str, Any] | None]
) -> None:
    """Change one of :data:`TABLES`, as the records of these entries say."""
    table = image.tables.setdefault(kind, {})
    for name, value in changes.items():
        if value is None:
            table.pop(name, None)
        else:
            table[name] = value
