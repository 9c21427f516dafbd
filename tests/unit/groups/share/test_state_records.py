"""The records of ``__share_group_state``, byte by byte."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.groups.share import state_records as records
from fencepost.groups.share.batches import StateBatch
from fencepost.groups.share.commands import SharePartitionKey
from fencepost.groups.share.state_records import DecodedRecord, Snapshot, Update
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.machine import Record

KEY = SharePartitionKey("g:1", bytes(range(16)), 5)

# Written out by hand from ShareSnapshotKey.json, ShareSnapshotValue.json and their siblings.
SNAPSHOT_KEY = bytes.fromhex(
    "0000"  # type
    "0003673a31"  # group id
    "000102030405060708090a0b0c0d0e0f"  # topic id
    "00000005"  # partition
)
UPDATE_KEY = bytes.fromhex("0001") + SNAPSHOT_KEY[2:]
SNAPSHOT_VALUE = bytes.fromhex(
    "0000"  # version
    "00000002"  # snapshot epoch
    "00000003"  # state epoch
    "00000004"  # leader epoch
    "000000000000000a"  # start offset
    "00000000000f4240"  # created 1000000
    "00000000000f4241"  # written 1000001
    "03"  # two batches
    "000000000000000a000000000000000b02000100"  # 10-11, acknowledged, delivered once
    "000000000000000c000000000000006300000200"  # 12-99, available, delivered twice
    "01000400000002"  # one tagged field of four bytes: delivery-complete count
)
UPDATE_VALUE = bytes.fromhex(
    "0000"
    "00000002"  # snapshot epoch
    "ffffffff"  # leader epoch: -1, unchanged
    "000000000000000a"  # start offset
    "01"  # no batches
    "00"  # delivery-complete count: -1, the default
)
SNAPSHOT = Snapshot(
    2, 3, 4, 10, 1_000_000, 1_000_001,
    (StateBatch(10, 11, 2, 1), StateBatch(12, 99, 0, 2)), 2,
)  # fmt: skip
UPDATE = Update(2, -1, 10, (), -1)


def test_encoded_records_equal_kafkas_bytes() -> None:
    assert records.snapshot_record(KEY, SNAPSHOT) == Record(SNAPSHOT_KEY, SNAPSHOT_VALUE)
    assert records.update_record(KEY, UPDATE) == Record(UPDATE_KEY, UPDATE_VALUE)
    assert records.tombstone(KEY) == Record(SNAPSHOT_KEY, None)


def test_records_decode_to_their_content() -> None:
    assert records.decode(Record(SNAPSHOT_KEY, SNAPSHOT_VALUE)) == (KEY, SNAPSHOT)
    assert records.decode(Record(UPDATE_KEY, UPDATE_VALUE)) == (KEY, UPDATE)
    assert records.decode(Record(SNAPSHOT_KEY, None)) == DecodedRecord(KEY, None)


def test_unknown_types_and_versions_are_skipped() -> None:
    assert records.decode(Record(bytes.fromhex("0002ffff"), b"")) is None
    assert records.decode(Record(SNAPSHOT_KEY, bytes.fromhex("0001") + SNAPSHOT_VALUE[2:])) is None


@pytest.mark.parametrize(
    "value",
    [
        SNAPSHOT_VALUE[:-1],
        SNAPSHOT_VALUE + b"\0",
        SNAPSHOT_VALUE.replace(bytes.fromhex("020001"), bytes.fromhex("090001")),
        SNAPSHOT_VALUE.replace(bytes.fromhex("0400000002"), bytes.fromhex("03000002")),
    ],
)
def test_damaged_values_are_refused(value: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        records.decode(Record(SNAPSHOT_KEY, value))


@given(key=st.binary(max_size=60), value=st.none() | st.binary(max_size=120))
def test_random_bytes_decode_or_are_corrupt(key: bytes, value: bytes | None) -> None:
    with contextlib.suppress(CorruptRecordError):
        records.decode(Record(bytes([0, len(key) % 2]) + key, value))
