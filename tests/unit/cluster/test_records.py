"""Metadata records as bytes: random values of every type survive a round trip."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints
from uuid import UUID

import pytest

from fencepost.cluster.record_codec import (
    decode,
    decode_framed,
    encode,
    record_version,
    topic_value,
)
from fencepost.cluster.records import (
    MetadataRecord,
    NoOpRecord,
    PartitionChangeRecord,
    PartitionRecord,
    TopicRecord,
    UnregisterControllerRecord,
)
from fencepost.logcore.errors import CorruptRecordError

_INTEGERS = {
    "feature_level": 15,
    "max_supported_version": 15,
    "min_supported_version": 15,
    "port": 16,
    "security_protocol": 15,
}
"""The sizes in bits of integers that have more than 8 and fewer than 32 bits."""
_WIDE = ("epoch", "timestamp", "next_producer_id")


def random_record(kind: Any, name: str, draw: random.Random) -> Any:
    if kind is bool:
        return draw.random() < 0.5
    if kind is int:
        bits = _INTEGERS.get(name, 63 if name in _WIDE or name == "broker_epoch" else 7)
        return draw.getrandbits(bits)
    if kind is float:
        return draw.choice((0.0, 1.5, -2e300, 0.1))
    if kind is str:
        return "".join(draw.choices("aä€😀.-_", k=draw.choice((0, 1, 5, 130))))
    if kind is bytes:
        return draw.randbytes(draw.choice((0, 1, 200)))
    if kind is UUID:
        return UUID(bytes=draw.randbytes(16))
    if get_origin(kind) is types.UnionType:
        inner = next(option for option in get_args(kind) if option is not type(None))
        return None if draw.random() < 0.3 else random_record(inner, name, draw)
    if get_origin(kind) is tuple:
        part = get_args(kind)[0]
        return tuple(random_record(part, name, draw) for _ in range(draw.choice((0, 1, 3, 130))))
    hints = get_type_hints(kind)
    return kind(
        **{field.name: random_record(hints[field.name], field.name, draw) for field in fields(kind)}
    )


@pytest.mark.parametrize("kind", get_args(MetadataRecord), ids=lambda kind: kind.__name__)
def test_random_records_survive_encoding_and_decoding(kind: Callable[..., MetadataRecord]) -> None:
    for seed in range(30):
        record = random_record(kind, "", random.Random(seed))
        value = encode(record)
        assert decode(value) == record, f"seed {seed}"
        for cut in range(1, min(len(value), 40)):
            with pytest.raises(CorruptRecordError):
                decode(value[:-cut])
        with pytest.raises(CorruptRecordError):
            decode(value + b"\0")


def test_metadata_records_encode_to_kafkas_bytes() -> None:
    # Records that a controller of Apache Kafka 4.3 wrote.
    topic = TopicRecord("t", UUID(int=0x1234))
    assert encode(topic).hex() == "010200" + "0274" + f"{0x1234:032x}" + "00"
    assert encode(NoOpRecord()).hex() == "01140000"
    change = PartitionChangeRecord(UUID(int=5), 1, isr=(1,), leader=3)
    plain, isr, leader = f"00000001{5:032x}", "00050200000001", "010400000003"
    assert encode(change).hex() == "010502" + plain + "02" + isr + leader


@pytest.mark.parametrize(
    "value", ["", "02", "011500", "010601", "010203", "010103", "01630000"], ids=str
)
def test_unknown_or_malformed_record_is_corrupt(value: str) -> None:
    with pytest.raises(CorruptRecordError):
        decode(bytes.fromhex(value))


def test_older_level_writes_older_version_or_refuses_newer_fields() -> None:
    partition = PartitionRecord(
        topic_id=UUID(int=9),
        replicas=(1,),
        isr=(1,),
        removing_replicas=(),
        adding_replicas=(),
        leader_epoch=0,
        partition_epoch=0,
        directories=(UUID(int=7),),
    )
    assert record_version(PartitionRecord, 16) == 0
    assert record_version(PartitionRecord, 22) == 1
    with pytest.raises(ValueError, match="directories"):
        encode(partition, 16)
    assert decode(encode(partition, 17)) == partition


@pytest.mark.parametrize("name", ["", "t", "ä" * 40, "x" * 126, "x" * 127, "x" * 249])
def test_topic_value_equals_the_encoded_topic_record(name: str) -> None:
    record = TopicRecord(name, UUID(int=5 << 64 | 7))
    value = topic_value(record.name, record.topic_id)
    assert value == encode(record)
    assert decode(value) == record == decode_framed(value)[0]


def test_unregister_controller_record_encodes_to_kafkas_bytes() -> None:
    """Type 29, version 0: one int32 and no tags."""
    value = bytes.fromhex("01 1d 00 00000065 00")
    assert encode(UnregisterControllerRecord(101)) == value
    assert decode(value) == UnregisterControllerRecord(101)
