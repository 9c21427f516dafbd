"""Batches of the metadata log, written by Fencepost and by other software."""

from __future__ import annotations

import random
from collections.abc import Sequence
from uuid import UUID

import pytest

from fencepost.cluster.controller.adoption import local_partition
from fencepost.cluster.image_records import partition_record
from fencepost.cluster.record_codec import SimilarPartitionRecords, Template, encode
from fencepost.cluster.records import PartitionChangeRecord, TopicRecord
from fencepost.coordinator.metadata.control_records import (
    described_control,
    leader_change,
    snapshot_footer,
    snapshot_header,
)
from fencepost.coordinator.metadata.framing import (
    MAX_BATCH_BYTES,
    data_batch,
    in_chunks,
    values_of,
)
from fencepost.logcore.batch import (
    Codec,
    LogRecord,
    decode_records,
    encode_batch,
    parse_header,
    verify_crc,
)
from fencepost.logcore.errors import CorruptRecordError, LogError

VALUES = [b"", b"x" * 63, b"x" * 64, b"y" * 9_000, *(b"v%d" % number for number in range(9_000))]


def test_metadata_batch_is_byte_identical_to_the_plain_encoding() -> None:
    batch = data_batch(VALUES, 5, base_offset=70, epoch=3)
    records = [LogRecord(70 + at, 5, None, value) for at, value in enumerate(VALUES)]
    assert batch == encode_batch(records, leader_epoch=3)
    header = parse_header(batch)
    verify_crc(batch, 0, header)
    assert values_of(header, batch) == VALUES


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP, Codec.ZSTD])
def test_metadata_batch_with_keys_headers_or_compression_is_read(codec: Codec) -> None:
    records = [
        LogRecord(0, 5, None, b"plain"),
        LogRecord(1, 5_000, None, b"later"),
        LogRecord(2, 5, b"key", b"with a key"),
        LogRecord(70_000, 5, None, b"with headers", (("h", b"1"),)),
    ]
    for some in (records, records[:1], records[1:2], records[2:3], records[3:]):
        batch = encode_batch(some, codec=codec)
        assert values_of(parse_header(batch), batch) == [record.value for record in some]


def plain(items: Sequence[bytes | SimilarPartitionRecords]) -> list[bytes]:
    """Return the values of all items, one by one."""
    values: list[bytes] = []
    for item in items:
        if isinstance(item, SimilarPartitionRecords):
            values += [item.value_at(*place) for place in item.places]
        else:
            values.append(item)
    return values


def change(topic: int, index: int, leader: int = 1) -> bytes:
    return encode(PartitionChangeRecord(UUID(int=topic), index, leader=leader))


def test_similar_partition_records_are_decoded_in_runs_to_the_same_values() -> None:
    values = [change(topic, index) for topic in range(5) for index in range(2_000)]
    batch = data_batch(values, 5)
    items = values_of(parse_header(batch), batch)
    assert len(items) < 400
    assert plain(items) == values


@pytest.mark.parametrize("seed", range(4))
def test_random_mixture_of_records_is_read_as_by_the_plain_decoder(seed: int) -> None:
    draw = random.Random(seed)
    partition = partition_record(UUID(int=0), 0, local_partition(1, UUID(int=9), 0))
    for _ in range(40):
        values: list[bytes] = []
        for _run in range(draw.randint(1, 12)):
            count, topic = draw.choice((1, 2, 7, 8, 9, 70, 300)), draw.getrandbits(128)
            kind = draw.choice(("change", "partition", "topic", "other", "leaders", "offsets"))
            for at in range(count):
                index = draw.choice((at, draw.getrandbits(31)))
                if kind == "change":
                    values.append(change(topic + draw.choice((0, at)) & (1 << 128) - 1, index))
                elif kind == "leaders":
                    values.append(change(topic, index, draw.choice((1, 2))))
                elif kind == "partition":
                    values += Template(partition).at(UUID(int=topic), [index])
                elif kind == "topic":
                    values.append(encode(TopicRecord(f"t{at}", UUID(int=topic))))
                else:
                    values.append(draw.randbytes(draw.choice((0, 5, len(change(0, 0))))))
        batch = data_batch(values, 5)
        assert batch == encode_batch(
            [LogRecord(at, 5, None, value) for at, value in enumerate(values)]
        )
        assert plain(values_of(parse_header(batch), batch)) == values


@pytest.mark.parametrize("skipped", [0, 1, 63, 64, 8_191])
def test_offset_gaps_do_not_change_the_decoded_values(skipped: int) -> None:
    records = [
        LogRecord(at if at < 70 else at + skipped, 5, None, change(1, at)) for at in range(150)
    ]
    batch = encode_batch(records)
    found = plain(values_of(parse_header(batch), batch))
    assert found == [record.value for record in records]


def test_metadata_record_without_a_value_is_refused_as_corrupt() -> None:
    batch = encode_batch([LogRecord(0, 0, None, b"v"), LogRecord(1, 0, None, None)])
    with pytest.raises(CorruptRecordError, match="no value"):
        values_of(parse_header(batch), batch)


def test_damaged_records_are_refused_or_read_as_by_the_plain_decoder() -> None:
    few = data_batch([b"abc", b"d" * 80, b"e"], 5)
    many = data_batch([change(1, index) for index in range(75)], 5)
    for batch, step in ((few, 1), (many, 7)):
        _check_damaged(batch, step)


def _check_damaged(batch: bytes, step: int) -> None:
    header = parse_header(batch)
    for at in range(61, len(batch), step):
        for bit in range(8):
            damaged = batch[:at] + bytes([batch[at] ^ 1 << bit]) + batch[at + 1 :]
            try:
                expected = [record.value for record in decode_records(damaged, 0, header)]
            except LogError:
                expected = None
            try:
                found = plain(values_of(header, damaged))
            except LogError:
                found = None
            # The CRC detects damage that affects only offsets.
            assert found == expected or expected is None, (at, bit)


def test_records_are_chunked_up_to_the_maximum_batch_size() -> None:
    half = b"x" * (MAX_BATCH_BYTES // 2)
    assert list(in_chunks([half, half])) == [[half, half]]
    assert list(in_chunks([half, half, b"x"])) == [[half, half], [b"x"]]
    assert list(in_chunks([b"x", half + half, b"x"])) == [[b"x"], [half + half], [b"x"]]
    assert list(in_chunks([half + half + b"x"])) == [[half + half + b"x"]]
    assert list(in_chunks([])) == []


def test_control_records_are_described_by_type_and_data() -> None:
    said = []
    for batch in (leader_change(7, 5), snapshot_header(4, 5, 2), snapshot_footer(5, 9, 2)):
        header = parse_header(batch)
        verify_crc(batch, 0, header)
        assert header.is_control
        (record,) = decode_records(batch)
        said.append(described_control(record))
    voters = [{"voterId": 7}]
    assert said == [
        {
            "type": "LEADER_CHANGE",
            "data": {"version": 0, "leaderId": 7, "voters": voters, "grantingVoters": voters},
        },
        {"type": "SNAPSHOT_HEADER", "data": {"version": 0, "lastContainedLogTimestamp": 4}},
        {"type": "SNAPSHOT_FOOTER", "data": {"version": 0}},
    ]
    assert described_control(LogRecord(0, 0, b"\0\0\0\1", b"\0\0\0\0\0\0")) is None
