"""Conversion of a metadata log in the format of Fencepost 0.1.

A record's key named the changed object, and its value (msgpack) held the object's whole new state;
a tombstone removed it. The resulting state is written as a snapshot beside the log. Once that file
exists, the old records below its end offset are ignored. Until then nothing is changed, so an
interrupted conversion is repeated when the broker starts again.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

import msgpack

from fencepost.cluster.controller.adoption import local_partition
from fencepost.cluster.image import BROKER_RESOURCE, GROUP_RESOURCE, TOPIC_RESOURCE
from fencepost.cluster.image_records import partition_record
from fencepost.cluster.record_codec import Template, encode
from fencepost.cluster.records import (
    AccessControlEntryRecord,
    ClientQuotaRecord,
    ConfigRecord,
    EntityData,
    FeatureLevelRecord,
    MetadataRecord,
    ProducerIdsRecord,
    TopicRecord,
    UserScramCredentialRecord,
)
from fencepost.coordinator.metadata.errors import MetadataError
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.logcore.machine import Record
from fencepost.logcore.values import dataclass

RECORD_VERSION = 1
"""The version of the values; values of a later version are refused."""

TOPIC, SETTINGS, PRODUCER_IDS, STARTS = "topic", "broker-configs", "producer-ids", "starts"
FEATURE = "feature"
ACL, SCRAM, QUOTA, SECRET = "acl", "scram", "quota", "secret"
_TABLES = frozenset({ACL, SCRAM, QUOTA, SECRET})
_GROUP_SCOPE = "group:"


def decode(record: Record) -> tuple[str, str, Mapping[str, Any] | None]:
    """Decode a record of the log: kind of object, name, and new state or None.

    Raises MetadataError.
    """
    try:
        kind, name = msgpack.unpackb(record.key)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MetadataError(f"{METADATA_TOPIC} holds a key that cannot be read") from error
    return kind, name, None if record.value is None else _unpack(record.value)


def _unpack(raw: bytes) -> dict[str, Any]:
    try:
        value = msgpack.unpackb(raw)
    except (ValueError, msgpack.UnpackException) as error:
        raise MetadataError(f"{METADATA_TOPIC} holds a value that cannot be read") from error
    if not isinstance(value, dict) or value.get("version") != RECORD_VERSION:
        raise MetadataError(f"{METADATA_TOPIC} holds a value of another version")
    return value


@dataclass(frozen=True, slots=True)
class _Topic:
    topic_id: uuid.UUID
    partitions: int
    configs: Mapping[str, str]
    leader_epoch_0: int
    """How many times the broker had started when the topic was created."""


@dataclass(slots=True)
class OldMetadata:
    """The state after the replay of a log in the old format."""

    starts: int = 0
    """How many times the broker has started. A topic's leader epoch is the number of starts after
    its creation."""
    deleted: set[uuid.UUID] = field(default_factory=set)
    _topics: dict[str, _Topic] = field(default_factory=dict)
    _settings: dict[str, Mapping[str, str]] = field(default_factory=dict)
    _levels: dict[str, int] = field(default_factory=dict)
    _tables: dict[str, dict[str, Mapping[str, Any]]] = field(default_factory=dict)
    _next_producer_id: int = 0

    @property
    def secret(self) -> bytes | None:
        """The server's secret; None if there is none yet."""
        return next((row["Secret"] for row in self._tables.get(SECRET, {}).values()), None)

    def apply(self, record: Record) -> None:
        """Replay one record. Raises MetadataError."""
        kind, name, value = decode(record)
        try:
            self._apply(kind, name, value)
        except (KeyError, TypeError, ValueError) as error:
            raise MetadataError(f"{METADATA_TOPIC}: the record of {name} lacks {error}") from error

    def _apply(self, kind: str, name: str, value: Mapping[str, Any] | None) -> None:
        if kind == TOPIC:
            self._put_topic(name, value)
        elif kind == SETTINGS:
            self._settings[name] = {} if value is None else dict(value["configs"])
        elif kind in _TABLES:
            table = self._tables.setdefault(kind, {})
            if value is None:
                table.pop(name, None)
            else:
                table[name] = value
        elif kind == FEATURE and value is not None:
            self._levels[name] = int(value["level"])
        elif kind == PRODUCER_IDS and value is not None:
            self._next_producer_id = value["next"]
        elif kind == STARTS and value is not None:
            self.starts = value["count"]
        else:
            raise MetadataError(f"{METADATA_TOPIC} holds an unknown record {kind!r}")

    def _put_topic(self, name: str, value: Mapping[str, Any] | None) -> None:
        topic = None
        if value is not None:
            topic = _Topic(
                uuid.UUID(bytes=value["id"]),
                int(value["partitions"]),
                dict(value["configs"]),
                int(value["first_start"]),
            )
        old = self._topics.pop(name, None) if topic is None else self._topics.get(name)
        if old is not None and (topic is None or old.topic_id != topic.topic_id):
            self.deleted.add(old.topic_id)
        if topic is not None:
            self._topics[name] = topic

    # --- conversion to Apache Kafka's records ---

    def values(
        self, defaults: Mapping[str, int], node_id: int, directory_id: uuid.UUID
    ) -> Iterator[bytes]:
        """Yield the values of equivalent records of Apache Kafka.

        ``defaults`` are the levels of features that were never changed. Raises MetadataError.
        """
        levels = {**defaults, **self._levels}
        for name, level in levels.items():
            if level:
                yield encode(FeatureLevelRecord(name, level))
        for name, topic in self._topics.items():
            yield encode(TopicRecord(name, topic.topic_id))
            epoch = self.starts - topic.leader_epoch_0
            state = local_partition(node_id, directory_id, epoch)
            template = Template(partition_record(topic.topic_id, 0, state))
            yield from template.at(topic.topic_id, range(topic.partitions))
        try:
            yield from map(encode, self._records())
        except (KeyError, TypeError, ValueError) as error:
            raise MetadataError(f"{METADATA_TOPIC}: a record lacks {error}") from error

    def _records(self) -> Iterator[MetadataRecord]:
        for name, topic in self._topics.items():
            for key, text in topic.configs.items():
                yield ConfigRecord(TOPIC_RESOURCE, name, key, text)
        for scope, settings in self._settings.items():
            kind = GROUP_RESOURCE if scope.startswith(_GROUP_SCOPE) else BROKER_RESOURCE
            for key, text in settings.items():
                yield ConfigRecord(kind, scope.removeprefix(_GROUP_SCOPE), key, text)
        yield ProducerIdsRecord(broker_id=-1, next_producer_id=self._next_producer_id)
        for entry in self._tables.get(QUOTA, {}).values():
            entity = tuple(
                EntityData(component["entityType"], component["entityName"])
                for component in entry["entity"]
            )
            yield ClientQuotaRecord(entity, entry["key"], float(entry["value"]), remove=False)
        for name, entry in self._tables.get(ACL, {}).items():
            yield AccessControlEntryRecord(
                uuid.UUID(name),
                entry["resourceType"],
                entry["resourceName"],
                entry["patternType"],
                entry["principal"],
                entry["host"],
                entry["operation"],
                entry["permissionType"],
            )
        for entry in self._tables.get(SCRAM, {}).values():
            yield UserScramCredentialRecord(
                entry["Name"],
                entry["Mechanism"],
                entry["Salt"],
                entry["StoredKey"],
                entry["ServerKey"],
                entry["Iterations"],
            )
