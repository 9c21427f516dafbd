"""Logs with messages of formats before v2: open, recover, fetch, append, compact."""

from __future__ import annotations

from pathlib import Path

import pytest

from fencepost.logcore.batch import LogRecord, decode_records, iter_headers
from fencepost.logcore.compression import Codec
from fencepost.logcore.legacy import (
    MIN_MESSAGE_SIZE,
    RUN_BYTES,
    leading_messages,
    magic_at,
)
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from fencepost.protocol.steps import finish
from tests.support.faults import MortalDisk
from tests.support.old_formats import encode_message_set
from tests.support.partitions import fetch_bytes
from tests.unit.logcore.compaction_driver import (
    committed,
    compact,
    essence,
    fill_active,
    put,
    small,
)
from tests.unit.logcore.partition_driver import T0, config, fetch_all, last_offset, open_partition

MIXTURES = {
    "v0": [(0, Codec.NONE)],
    "v1": [(1, Codec.NONE)],
    "compressed": [(0, Codec.GZIP), (1, Codec.SNAPPY), (1, Codec.LZ4)],
    "v0 then v1": [(0, Codec.NONE), (0, Codec.LZ4), (1, Codec.NONE), (1, Codec.GZIP)],
}


def old_log(root: Path, mixture: str, *, sets: int = 8, name: str = "orders") -> list[LogRecord]:
    """Write a segment of message sets with three records each; return the records."""
    directory = root / f"{name}-0"
    directory.mkdir(parents=True)
    kinds = MIXTURES[mixture]
    raw, records = b"", []
    for number in range(sets):
        magic, codec = kinds[number * len(kinds) // sets]
        some = [
            LogRecord(3 * number + at, T0 + number if magic else -1, b"k%d" % at, b"v%d" % number)
            for at in range(3)
        ]
        raw += encode_message_set(some, magic, codec=codec)
        records += some
    (directory / f"{0:020d}.log").write_bytes(raw)
    return records


def decoded(data: bytes) -> list[LogRecord]:
    return [
        record for pos, header in iter_headers(data) for record in decode_records(data, pos, header)
    ]


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("clean", [True, False])
def test_log_of_old_formats_opens_and_serves_v2(tmp_path: Path, mixture: str, clean: bool) -> None:
    records = old_log(tmp_path, mixture)
    partition = open_partition(tmp_path, clean=clean, config=config(index_interval_bytes=60))
    assert partition.log_end_offset == 24
    assert decoded(fetch_all(partition)) == records
    for offset in range(24):
        fetched = fetch_bytes(partition, offset, 1, Isolation.READ_COMMITTED)
        found = decoded(fetched.records)
        assert found[0].offset <= offset <= found[-1].offset
        everything = fetch_bytes(partition, offset, 1 << 20, Isolation.READ_COMMITTED)
        assert [record for record in decoded(everything.records) if record.offset >= offset] == (
            records[offset:]
        )
    walked = [
        record for _, batch in partition.reader.read_all() for record in decoded(bytes(batch))
    ]
    assert walked == records
    assert fetch_bytes(partition, 24, 100, Isolation.READ_COMMITTED).records == b""


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP])
def test_read_converts_a_bounded_number_of_old_messages(tmp_path: Path, codec: Codec) -> None:
    records = [LogRecord(at, T0, b"", b"v%d" % at) for at in range(20_000)]
    sets = [records[at : at + 100] for at in range(0, len(records), 100)]
    raw = b"".join(encode_message_set(chunk, 1, codec=codec) for chunk in sets)
    assert len(raw) > 2 * RUN_BYTES
    (tmp_path / "orders-0").mkdir()
    (tmp_path / "orders-0" / f"{0:020d}.log").write_bytes(raw)
    partition = open_partition(tmp_path, config=config(index_interval_bytes=4096))
    found: list[LogRecord] = []
    while len(found) < len(records):
        read = fetch_bytes(partition, len(found), len(raw), Isolation.READ_COMMITTED)
        some = decoded(read.records)
        assert len(encode_message_set(some, 1)) <= RUN_BYTES or codec is not Codec.NONE
        assert len(some) < len(records)
        assert some[0].offset <= len(found) < some[-1].offset + 1
        found += [record for record in some if record.offset >= len(found)]
    assert found == records


def test_wrapper_larger_than_a_turn_is_read_if_it_fits_the_fetch(tmp_path: Path) -> None:
    records = [LogRecord(at, T0, b"", bytes(1000)) for at in range(100)]
    raw = encode_message_set(records, 1, codec=Codec.GZIP, level=0)
    assert len(raw) > RUN_BYTES
    (tmp_path / "orders-0").mkdir()
    (tmp_path / "orders-0" / f"{0:020d}.log").write_bytes(raw)
    partition = open_partition(tmp_path)
    for most, count in ((len(raw), 100), (len(raw) - 1, 0)):
        read = fetch_bytes(partition, 0, most, Isolation.READ_COMMITTED, at_least_one=False)
        assert len(decoded(read.records)) == count


@pytest.mark.parametrize("mixture", MIXTURES)
def test_batches_are_appended_after_messages_of_old_formats(tmp_path: Path, mixture: str) -> None:
    records = old_log(tmp_path, mixture)
    partition = open_partition(tmp_path, clean=False, leader_epoch=4)
    put(partition, [(b"new", b"1")], producer_id=9)
    before = essence(partition)
    assert partition.log_end_offset == 25
    assert [record.offset for record in decoded(fetch_all(partition))] == list(range(25))
    partition.close()
    for clean in (True, False):
        again = open_partition(tmp_path, clean=clean, leader_epoch=4)
        assert essence(again) == before
        assert decoded(fetch_all(again))[:24] == records
        again.close()


def test_torn_old_message_is_truncated_by_recovery(tmp_path: Path) -> None:
    records = old_log(tmp_path, "v0 then v1")
    path = tmp_path / "orders-0" / f"{0:020d}.log"
    whole = path.read_bytes()
    last = len(encode_message_set(records[-3:], 1, codec=Codec.GZIP))
    for size in range(len(whole) - last + 1, len(whole)):
        path.write_bytes(whole[:size])
        partition = open_partition(tmp_path, clean=False)
        assert partition.log_end_offset == 21, size
        assert partition.recovery is not None
        assert partition.recovery.reason
        partition.close()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert open_partition(tmp_path, clean=False).log_end_offset == 21


def test_timestamp_lookup_finds_v1_messages(tmp_path: Path) -> None:
    old_log(tmp_path, "v1")
    partition = open_partition(tmp_path, config=config(index_interval_bytes=60))
    found = finish(partition.reader.offset_for_timestamp(T0 + 5, Isolation.READ_COMMITTED))
    assert found is not None
    assert found[:2] == (15, T0 + 5)
    assert finish(partition.reader.max_timestamp_offset(Isolation.READ_UNCOMMITTED)) == (
        21,
        T0 + 7,
        -1,
    )
    old_log(tmp_path, "v0", name="plain")
    plain = open_partition(tmp_path, name="plain")
    assert finish(plain.reader.max_timestamp_offset(Isolation.READ_UNCOMMITTED)) is None


def test_truncation_inside_old_messages_keeps_earlier_records(tmp_path: Path) -> None:
    records = old_log(tmp_path, "v1")
    partition = open_partition(tmp_path)
    partition.truncate_to(10)
    assert partition.log_end_offset == 10
    assert decoded(fetch_all(partition)) == records[:10]


@pytest.mark.parametrize("mixture", MIXTURES)
def test_compaction_converts_old_messages_to_v2(tmp_path: Path, mixture: str) -> None:
    old_log(tmp_path, mixture)
    partition = open_partition(
        tmp_path, config=small(segment_bytes=2_000), fs=MortalDisk(), clean=False
    )
    fill_active(partition)
    before = essence(partition)
    assert compact(partition) is not None
    assert essence(partition) == before
    assert {offset: committed(partition)[offset] for offset in (21, 22, 23)} == {
        21: (b"k0", b"v7"),
        22: (b"k1", b"v7"),
        23: (b"k2", b"v7"),
    }
    assert 20 not in committed(partition)
    raw = Path(partition.log.segments[0].path).read_bytes()
    assert all(header.magic == 2 for _, header in iter_headers(raw))
    partition.close()
    again = Partition.open(
        MortalDisk(),
        partition.log.directory,
        topic=partition.topic,
        index=0,
        topic_id=partition.topic_id,
        config=partition.log.config,
        clock=partition._clock,
        clean=False,
    )
    assert essence(again) == before


def test_smallest_v0_message_is_recovered_and_served(tmp_path: Path) -> None:
    raw = encode_message_set([LogRecord(0, -1, None, None)], 0)
    assert len(raw) == MIN_MESSAGE_SIZE
    assert leading_messages(raw * 3 + raw[:-1]) == 3 * len(raw)
    directory = tmp_path / "orders-0"
    directory.mkdir()
    (directory / f"{0:020d}.log").write_bytes(raw)
    partition = open_partition(tmp_path, clean=False)
    assert partition.log_end_offset == 1
    data = fetch_all(partition)
    assert magic_at(data, 0) == 2
    assert last_offset(data) == 0
