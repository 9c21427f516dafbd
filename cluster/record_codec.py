"""Encodes and decodes metadata records.

A record's value is the version of the frame (1), the type's key and its version, each an unsigned
varint, then the fields in the flexible encoding of KIP-482. :data:`_SCHEMAS` lists the fields. An
unknown type or version, and trailing bytes, are refused: the records after an undecodable record
must not be applied.

Source: ``AbstractApiMessageSerde``, ``MetadataRecordSerde``; the schemas ``metadata/*.json``;
``MetadataVersion`` for the record version at each level.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from operator import attrgetter
from typing import Any, Final, NamedTuple
from uuid import UUID

from fencepost.cluster import records
from fencepost.cluster.records import (
    BrokerRegistrationChangeRecord,
    MetadataRecord,
    PartitionChangeRecord,
    PartitionRecord,
    RegisterBrokerRecord,
    TopicRecord,
)
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.fields import FieldReader, FieldWriter

FRAME_VERSION: Final = 1
"""The version of the frame around every record."""

METADATA_VERSION: Final = 30
"""Level 4.3-IV0, which decides the written record versions unless another level is finalized."""


class Field(NamedTuple):
    """One field of a structure: its attribute, and its type or the class of its elements."""

    name: str
    kind: str | type
    array: bool = False
    since: int = 0
    """The first version with the field."""
    tag: int | None = None
    nullable: bool = False


_SCHEMAS: Final = """
BrokerEndpoint
  name string
  host string
  port uint16
  security_protocol int16
BrokerFeature
  name string
  min_supported_version int16
  max_supported_version int16
EntityData
  entity_type string
  entity_name string nullable
ControllerEndpoint
  name string
  host string
  port uint16
  security_protocol int16
ControllerFeature
  name string
  min_supported_version int16
  max_supported_version int16
RegisterBrokerRecord 0 4
  broker_id int32
  is_migrating_zk_broker bool since=2
  incarnation_id uuid
  broker_epoch int64
  end_points []BrokerEndpoint
  features []BrokerFeature
  rack string nullable
  fenced bool
  in_controlled_shutdown bool since=1
  log_dirs []uuid since=3 tag=0
  cordoned_log_dirs []uuid nullable since=4 tag=1
UnregisterBrokerRecord 1 0
  broker_id int32
  broker_epoch int64
TopicRecord 2 0
  name string
  topic_id uuid
PartitionRecord 3 2
  partition_id int32
  topic_id uuid
  replicas []int32
  isr []int32
  removing_replicas []int32
  adding_replicas []int32
  leader int32
  leader_recovery_state int8 tag=0
  leader_epoch int32
  partition_epoch int32
  directories []uuid since=1
  eligible_leader_replicas []int32 nullable since=2 tag=1
  last_known_elr []int32 nullable since=2 tag=2
ConfigRecord 4 0
  resource_type int8
  resource_name string
  name string
  value string nullable
PartitionChangeRecord 5 2
  partition_id int32
  topic_id uuid
  isr []int32 nullable tag=0
  leader int32 tag=1
  replicas []int32 nullable tag=2
  removing_replicas []int32 nullable tag=3
  adding_replicas []int32 nullable tag=4
  leader_recovery_state int8 tag=5
  directories []uuid nullable since=1 tag=8
  eligible_leader_replicas []int32 nullable since=2 tag=6
  last_known_elr []int32 nullable since=2 tag=7
FenceBrokerRecord 7 0
  id int32
  epoch int64
UnfenceBrokerRecord 8 0
  id int32
  epoch int64
RemoveTopicRecord 9 0
  topic_id uuid
DelegationTokenRecord 10 0
  owner string
  requester string
  renewers []string
  issue_timestamp int64
  max_timestamp int64
  expiration_timestamp int64
  token_id string
UserScramCredentialRecord 11 0
  name string
  mechanism int8
  salt bytes
  stored_key bytes
  server_key bytes
  iterations int32
FeatureLevelRecord 12 0
  name string
  feature_level int16
ClientQuotaRecord 14 0
  entity []EntityData
  key string
  value float64
  remove bool
ProducerIdsRecord 15 0
  broker_id int32
  broker_epoch int64
  next_producer_id int64
BrokerRegistrationChangeRecord 17 3
  broker_id int32
  broker_epoch int64
  fenced int8 tag=0
  in_controlled_shutdown int8 since=1 tag=1
  log_dirs []uuid since=2 tag=2
  cordoned_log_dirs []uuid nullable since=3 tag=3
AccessControlEntryRecord 18 0
  id uuid
  resource_type int8
  resource_name string
  pattern_type int8
  principal string
  host string
  operation int8
  permission_type int8
RemoveAccessControlEntryRecord 19 0
  id uuid
NoOpRecord 20 0
ZkMigrationStateRecord 21 0
  zk_migration_state int8
RemoveUserScramCredentialRecord 22 0
  name string
  mechanism int8
BeginTransactionRecord 23 0
  name string nullable tag=0
EndTransactionRecord 24 0
AbortTransactionRecord 25 0
  reason string nullable tag=0
RemoveDelegationTokenRecord 26 0
  token_id string
RegisterControllerRecord 27 0
  controller_id int32
  incarnation_id uuid
  zk_migration_ready bool
  end_points []ControllerEndpoint
  features []ControllerFeature
ClearElrRecord 28 0
  topic_name string
UnregisterControllerRecord 29 0
  controller_id int32
"""
"""First the structures inside records, and then the records, each with its key and its newest
version. The fields of a structure or record are in the lines below it, in the schema's order."""


def _read_schemas() -> tuple[dict[type, tuple[Field, ...]], dict[type, tuple[int, int]]]:
    """Return the fields of each class, and key and newest version of the records."""
    layouts: dict[type, tuple[Field, ...]] = {}
    versions: dict[type, tuple[int, int]] = {}
    for entry in re.split(r"\n(?! )", _SCHEMAS.strip()):
        head, *lines = entry.splitlines()
        name, *numbers = head.split()
        kind = getattr(records, name)
        layouts[kind] = tuple(map(_read_field, lines))
        if numbers:
            key, newest = map(int, numbers)
            versions[kind] = key, newest
    return layouts, versions


def _read_field(line: str) -> Field:
    name, kind, *more = line.split()
    element = kind.removeprefix("[]")
    attributes = dict(item.partition("=")[::2] for item in more)
    return Field(
        name,
        getattr(records, element, element),
        array=kind != element,
        since=int(attributes.get("since", 0)),
        tag=int(attributes["tag"]) if "tag" in attributes else None,
        nullable="nullable" in attributes,
    )


_LAYOUTS, _VERSIONS = _read_schemas()
"""Fields by class; key and newest version by record type."""

_WRITTEN_SINCE: Final[Mapping[type, tuple[tuple[int, int], ...]]] = {
    RegisterBrokerRecord: ((30, 4), (17, 3), (8, 2), (0, 1)),
    PartitionRecord: ((23, 2), (17, 1)),
    PartitionChangeRecord: ((23, 2), (17, 1)),
    BrokerRegistrationChangeRecord: ((30, 3), (17, 2), (0, 1)),
}
"""(metadata.version, record version) pairs, newest first: the record version written from that
level on. Below the lowest level in the pairs, version 0 is written."""

_TOPIC_KIND: Final = bytes((FRAME_VERSION, 2, 0))
_TOPIC_BYTES: Final = 20
"""The size of a TopicRecord without its name."""
_ONE_BYTE: Final = 0x80
"""Unsigned varints below this value take one byte."""

_DOUBLE: Final = struct.Struct(">d")
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_UINT16: Final = struct.Struct(">H")

Read = Callable[[FieldReader], Any]
Write = Callable[[FieldWriter, Any], None]

_PRIMITIVES: Final[Mapping[str, tuple[Read, Write]]] = {
    "int8": (FieldReader.int8, FieldWriter.int8),
    "int16": (FieldReader.int16, lambda out, value: out.raw(_INT16.pack(value))),
    "uint16": (
        lambda data: _UINT16.unpack(data.raw(2))[0],
        lambda out, value: out.raw(_UINT16.pack(value)),
    ),
    "int32": (FieldReader.int32, FieldWriter.int32),
    "int64": (FieldReader.int64, FieldWriter.int64),
    "bool": (lambda data: data.int8() != 0, lambda out, value: out.int8(int(value))),
    "float64": (
        lambda data: _DOUBLE.unpack(data.raw(8))[0],
        lambda out, value: out.raw(_DOUBLE.pack(value)),
    ),
    "string": (FieldReader.string, FieldWriter.string),
    "bytes": (FieldReader.bytes_, FieldWriter.bytes_),
    "uuid": (
        lambda data: UUID(bytes=data.raw(16)),
        lambda out, value: out.raw(value.bytes),
    ),
}


class _Step(NamedTuple):
    """The reader and the writer of one field in one version of a structure."""

    name: str
    read: Read
    write: Write
    default: object
    tag: int | None


class Structure(NamedTuple):
    """The readers and writers of one version of a structure."""

    build: Callable[..., Any]
    plain: tuple[_Step, ...]
    tagged: Mapping[int, _Step]
    absent: tuple[_Step, ...]
    """Fields that only newer versions have; they must have their default value."""

    def read(self, data: FieldReader) -> Any:
        """Read the fields and the tagged fields after them."""
        values = {step.name: step.read(data) for step in self.plain}
        for tag, raw in data.tags().items():
            step = self.tagged.get(tag)
            if step is not None:
                inner = FieldReader(raw, flexible=True)
                values[step.name] = step.read(inner)
                inner.end()
        return self.build(**values)

    def write(self, out: FieldWriter, value: object) -> None:
        """Write the fields, and the tagged fields that differ from their default."""
        for step in self.absent:
            if getattr(value, step.name) != step.default:
                raise ValueError(f"this version of {type(value).__name__} has no {step.name}")
        for step in self.plain:
            step.write(out, getattr(value, step.name))
        tags: dict[int, bytes] = {}
        for tag, step in self.tagged.items():
            field = getattr(value, step.name)
            if field != step.default:
                inner = FieldWriter(None, flexible=True)
                step.write(inner, field)
                tags[tag] = inner.done()
        out.tags(tags)


def _structure(kind: type, layout: tuple[Field, ...], version: int) -> Structure:
    defaults = {
        field.name: None if field.default is MISSING else field.default for field in fields(kind)
    }
    steps = [
        (field, _Step(field.name, *_codec_of(field, version), defaults[field.name], field.tag))
        for field in layout
    ]
    present = [step for field, step in steps if field.since <= version]
    return Structure(
        kind,
        tuple(step for step in present if step.tag is None),
        {
            step.tag: step
            for step in sorted(present, key=attrgetter("name"))
            if step.tag is not None
        },
        tuple(step for field, step in steps if field.since > version),
    )


def _codec_of(field: Field, version: int) -> tuple[Read, Write]:
    """Return the reader and the writer of a field, including arrays and nulls."""
    if isinstance(field.kind, str):
        if field.kind == "string" and field.nullable:
            return FieldReader.nullable_string, FieldWriter.string
        read, write = _PRIMITIVES[field.kind]
    else:
        part = _structure(field.kind, _LAYOUTS[field.kind], version)
        read, write = part.read, part.write
    return _array(read, write, field) if field.array else (read, write)


def _array(read: Read, write: Write, field: Field) -> tuple[Read, Write]:
    def read_all(data: FieldReader) -> tuple[Any, ...] | None:
        count = data.nullable_count()
        if count is None:
            if not field.nullable:
                raise CorruptRecordError(f"{field.name} is null, which it may not be")
            return None
        return tuple(read(data) for _ in range(count))

    def write_all(out: FieldWriter, values: tuple[Any, ...] | None) -> None:
        if values is None:
            out.uvarint(0)
            return
        out.count(len(values))
        for value in values:
            write(out, value)

    return read_all, write_all


_STRUCTURES: Final[dict[tuple[int, int], Structure]] = {}
"""The structures used so far, by key and version."""
_BY_KEY: Final = {key: (kind, newest) for kind, (key, newest) in _VERSIONS.items()}


def _structure_of(key: int, version: int) -> Structure:
    structure = _STRUCTURES.get((key, version))
    if structure is None:
        if key not in _BY_KEY:
            raise CorruptRecordError(f"there is no metadata record with the key {key}")
        kind, newest = _BY_KEY[key]
        if version > newest:
            raise CorruptRecordError(
                f"version {version} of {kind.__name__} is not supported; the newest is {newest}"
            )
        structure = _STRUCTURES[key, version] = _structure(kind, _LAYOUTS[kind], version)
    return structure


def record_version(kind: type[MetadataRecord], metadata_version: int = METADATA_VERSION) -> int:
    """Return the version in which a record type is written at that metadata.version."""
    for level, version in _WRITTEN_SINCE.get(kind, ()):
        if metadata_version >= level:
            return version
    return 0


def encode(record: MetadataRecord, metadata_version: int = METADATA_VERSION) -> bytes:
    """Encode a record. Raises ValueError for a field that the level's version lacks."""
    kind = type(record)
    key = _VERSIONS[kind][0]
    version = record_version(kind, metadata_version)
    out = FieldWriter(None, flexible=True)
    out.uvarint(FRAME_VERSION)
    out.uvarint(key)
    out.uvarint(version)
    _structure_of(key, version).write(out, record)
    return out.done()


def decode(value: bytes) -> MetadataRecord:
    """Decode a record's value. Raises CorruptRecordError unless every byte is understood."""
    if value.startswith(_TOPIC_KIND):
        topic = _plain_topic(value)
        if topic is not None:
            return topic
    return decode_framed(value)[0]


def _plain_topic(value: bytes) -> TopicRecord | None:
    """Decode a topic with a one-byte name length and no tags: a starting broker reads thousands."""
    size = value[3] if len(value) > _TOPIC_BYTES else 0
    if not 0 < size < _ONE_BYTE or len(value) != _TOPIC_BYTES + size or value[-1]:
        return None
    try:
        name = value[4 : 3 + size].decode()
    except UnicodeDecodeError:
        return None
    return TopicRecord(name, UUID(bytes=value[3 + size : -1]))


def topic_value(name: str, topic_id: UUID) -> bytes:
    """Encode a TopicRecord, with the same result as :func:`encode`."""
    raw = name.encode()
    if len(raw) >= _ONE_BYTE - 1:
        return encode(TopicRecord(name, topic_id))
    return b"%b%c%b%b\0" % (_TOPIC_KIND, len(raw) + 1, raw, topic_id.bytes)


def decode_framed(value: bytes) -> tuple[MetadataRecord, int, Structure]:
    """Decode a record's value; return the record, its version and that version's structure.

    Raises as :func:`decode` does.
    """
    data = FieldReader(value, flexible=True)
    frame = data.uvarint()
    if frame != FRAME_VERSION:
        raise CorruptRecordError(f"a metadata record in a frame of version {frame}")
    key, version = data.uvarint(), data.uvarint()
    structure = _structure_of(key, version)
    record: MetadataRecord = structure.read(data)
    data.end()
    return record, version, structure


# --- many partitions at once ---

KIND: Final = slice(0, 3)
"""The position of frame, key and version in a value, if each takes one byte."""
PARTITION: Final = slice(3, 7)
"""The position of the partition index in a value whose kind is in :data:`OF_ONE_PARTITION`."""
BODY: Final = slice(7, None)
"""The topic id and the fields after it: equal if two records differ only in the index."""
BODY_AFTER_TOPIC_ID: Final = slice(23, None)
"""The fields after the topic id: equal if two records differ only in the partition."""
TOPIC_ID: Final = slice(7, 23)

PARTITION_KIND: Final = bytes((FRAME_VERSION, 3, 2))
PARTITION_CHANGE_KIND: Final = bytes((FRAME_VERSION, 5, 2))
OF_ONE_PARTITION: Final = frozenset({PARTITION_KIND, PARTITION_CHANGE_KIND})
"""The kinds of the most frequent records: PartitionRecord and PartitionChangeRecord in their newest
versions."""


class SimilarPartitionRecords(NamedTuple):
    """Values of one kind in :data:`OF_ONE_PARTITION` that differ only in the partition."""

    kind: bytes
    """The common :data:`KIND`."""
    body: bytes
    """The common :data:`BODY_AFTER_TOPIC_ID`."""
    places: Iterable[tuple[int, bytes]]
    """The partition index and the topic id of each value."""

    def value_at(self, partition: int, topic_id: bytes) -> bytes:
        """Return the value for one partition."""
        return self.kind + _INT32.pack(partition) + topic_id + self.body


class Template:
    """A record's value, from which the same record for other partitions is built."""

    def __init__(self, record: PartitionRecord | PartitionChangeRecord) -> None:
        value = encode(record)
        self._kind, self._body = value[KIND], value[BODY_AFTER_TOPIC_ID]

    def at(self, topic_id: UUID, partitions: Iterable[int]) -> list[bytes]:
        """Return the values for these partitions of a topic."""
        kind, body, pack = self._kind, topic_id.bytes + self._body, _INT32.pack
        return [kind + pack(partition) + body for partition in partitions]
