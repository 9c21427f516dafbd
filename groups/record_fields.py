"""Fields that the records of consumer groups and of share groups have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fencepost.logcore.fields import FieldReader, FieldWriter

_ONLY_TAG: Final = 0

TopicPartitions = tuple[bytes, tuple[int, ...]]
"""A topic id (16 bytes) and partition indexes."""


def write_strings(writer: FieldWriter, texts: tuple[str, ...]) -> None:
    """Write an array of strings."""
    writer.count(len(texts))
    for text in texts:
        writer.string(text)


def write_int32s(writer: FieldWriter, numbers: tuple[int, ...]) -> None:
    """Write an array of numbers of 32 bits."""
    writer.count(len(numbers))
    writer.int32s(numbers)


def write_topics(writer: FieldWriter, topics: Iterable[TopicPartitions]) -> None:
    """Write an array of topic ids with partitions."""
    rows = tuple(topics)
    writer.count(len(rows))
    for topic_id, partitions in rows:
        writer.raw(topic_id)
        write_int32s(writer, partitions)
        writer.tags({})


def tag_int64(value: int) -> dict[int, bytes]:
    """Return the only tagged field of a structure, or no field for the default of 0."""
    return {_ONLY_TAG: value.to_bytes(8, signed=True)} if value else {}


def read_strings(reader: FieldReader) -> tuple[str, ...]:
    """Read an array of strings."""
    return tuple(reader.string() for _ in range(reader.count()))


def read_int32s(reader: FieldReader) -> tuple[int, ...]:
    """Read an array of numbers of 32 bits."""
    return reader.int32s(reader.count())


def read_topics(reader: FieldReader) -> tuple[TopicPartitions, ...]:
    """Read an array of topic ids with partitions."""
    topics = []
    for _ in range(reader.count()):
        topics.append((reader.raw(16), read_int32s(reader)))
        reader.tags()
    return tuple(topics)


def read_only_tag(reader: FieldReader) -> int:
    """Read the only tagged field of a structure, a number of 64 bits; 0 if it is absent."""
    field = reader.tags().get(_ONLY_TAG)
    return 0 if field is None else FieldReader(field).int64()
