from __future__ import annotations

import errno
import uuid
from pathlib import Path

import pytest

from fencepost.logcore.batch import (
    LogRecord,
    decode_records,
    encode_batch,
    end_marker,
    parse_header,
    verify_crc,
)
from fencepost.logcore.compression import Codec
from fencepost.logcore.epochs import check_leader_epoch
from fencepost.logcore.errors import (
    CorruptRecordError,
    FencedLeaderEpochError,
    InvalidRecordError,
    InvalidTimestampError,
    NoSpaceError,
    NotOneBatchError,
    RecordTooLargeError,
    StorageError,
    UnknownLeaderEpochError,
    UnsupportedCompressionError,
)
from fencepost.logcore.fs import OsFileSystem
from fencepost.logcore.machine import EndMarker, ProducerStamp, Record
from fencepost.logcore.partition import Appended, Partition
from fencepost.logcore.reading import Isolation
from fencepost.logcore.validation import validate
from fencepost.protocol.steps import finish
from tests.support.clock import ManualClock
from tests.support.faults import FaultyDisk
from tests.support.partitions import append_batch, fetch_bytes, retain
from tests.unit.logcore.partition_driver import (
    T0,
    append,
    client_batch,
    config,
    crash_image,
    delete,
    marker,
    open_partition,
    state_of,
)

UNCOMMITTED, COMMITTED = Isolation.READ_UNCOMMITTED, Isolation.READ_COMMITTED


# --- opening ---


def test_new_partition_is_empty_and_has_only_a_log_file(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    assert partition.log_start_offset == partition.log_end_offset == partition.high_watermark == 0
    assert partition.last_stable_offset == 0
    assert fetch_bytes(partition, 0, 100, COMMITTED) == (b"", 0, 0, 0, (), False)
    assert [path.name for path in (tmp_path / "orders-0").iterdir()] == [f"{0:020d}.log"]


def test_topic_id_is_on_disk_before_the_first_batch(tmp_path: Path) -> None:
    fs = FaultyDisk()
    fs.write_fails = lambda path: path.endswith(".log")
    partition = open_partition(tmp_path, fs=fs)
    with pytest.raises(StorageError):
        append(partition)
    text = (tmp_path / "orders-0" / "partition.metadata").read_text()
    assert text == "version: 0\ntopic_id: AQIDBAUGBwgJCgsMDQ4PEA"


def test_directory_of_another_topic_id_is_refused(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition)
    partition.close()
    with pytest.raises(StorageError, match="topic id"):
        Partition.open(
            OsFileSystem(),
            tmp_path / "orders-0",
            topic="orders",
            index=0,
            topic_id=uuid.UUID(int=99),
            config=config(),
            clock=ManualClock(),
            clean=True,
        )


def test_damaged_partition_metadata_is_rewritten(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition)
    partition.close()
    path = tmp_path / "orders-0" / "partition.metadata"
    good = path.read_bytes()
    path.write_bytes(b"")
    append(open_partition(tmp_path))
    assert path.read_bytes() == good


def test_offsets_continue_after_a_restart(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition, 3)
    partition.close()
    partition.close()
    with pytest.raises(StorageError):
        append(partition)
    assert partition.offline is None
    again = open_partition(tmp_path)
    assert again.recovery_point == 3
    assert append(again, 2) == (3, 4, -1, 0, False)


# --- appends by clients (kafka: LogValidator) ---


def raw(**fields: object) -> bytes:
    values: dict[str, object] = {"records": [LogRecord(0, T0, b"k", b"v")], **fields}
    return encode_batch(values.pop("records"), **values)  # type: ignore[arg-type]


def patched(data: bytes, position: int, value: bytes) -> bytes:
    """Change header fields and recompute the CRC."""
    from crc32c import crc32c

    out = bytearray(data)
    out[position : position + len(value)] = value
    out[17:21] = crc32c(bytes(out[21:])).to_bytes(4, "big")
    return bytes(out)


REFUSED = {
    "too short": (raw()[:60], NotOneBatchError),
    "torn": (raw()[:-1], NotOneBatchError),
    "crc": (raw()[:-1] + b"\xff", CorruptRecordError),
    "negative length": (raw()[:8] + b"\xff" * 4 + raw()[12:], CorruptRecordError),
    "format 1": (raw()[:16] + b"\x01" + raw()[17:], InvalidRecordError),
    "two batches": (raw() + raw(), InvalidRecordError),
    "base offset": (raw(base_offset=1, records=[LogRecord(1, T0, b"", b"")]), InvalidRecordError),
    "empty": (raw(records=[], base_offset=0, last_offset_delta=0), InvalidRecordError),
    "hole": (raw(last_offset_delta=1), InvalidRecordError),
    "count": (patched(raw(), 57, b"\x00\x00\x00\x02"), InvalidRecordError),
    "count and delta": (
        patched(patched(raw(), 57, b"\x00\x10\x00\x00"), 23, b"\x00\x0f\xff\xff"),
        InvalidRecordError,
    ),
    "control": (
        end_marker(
            commit=True, producer_id=1, producer_epoch=0, coordinator_epoch=0, timestamp_ms=T0
        ),
        InvalidRecordError,
    ),
    "transaction of nobody": (raw(transactional=True), InvalidRecordError),
    "no sequence": (raw(producer_id=1, producer_epoch=0), InvalidRecordError),
    "codec 5": (patched(raw(), 21, b"\x00\x05"), UnsupportedCompressionError),
    "future": (raw(records=[LogRecord(0, T0 + 3_600_001, b"", b"")]), InvalidTimestampError),
    "append time without time": (
        raw(records=[LogRecord(0, -1, b"", b"")], log_append_time=True),
        InvalidTimestampError,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_batch_is_refused_and_changes_nothing(tmp_path: Path, case: str) -> None:
    data, error = REFUSED[case]
    partition = open_partition(tmp_path)
    with pytest.raises(error):
        append_batch(partition, data, now_ms=T0, transaction_verified=True)
    assert (partition.log_end_offset, partition.log.size_bytes) == (0, 0)
    assert not list(partition.producers.view())


def test_timestamp_at_exactly_the_future_limit_is_accepted(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition, timestamp_ms=T0 + 3_600_000)
    assert [batch.max_timestamp for batch, _ in partition.reader.read_all()] == [T0 + 3_600_000]


def test_batch_of_exactly_max_message_bytes_is_accepted_larger_one_is_refused(
    tmp_path: Path,
) -> None:
    data = client_batch()
    partition = open_partition(tmp_path, config=config(max_message_bytes=len(data)))
    append_batch(partition, data, now_ms=T0)
    partition.log.config = config(max_message_bytes=len(data) - 1)
    with pytest.raises(RecordTooLargeError):
        append_batch(partition, data, now_ms=T0)
    assert (partition.log_end_offset, partition.log.size_bytes) == (1, len(data))


def test_zstd_batch_of_an_old_produce_version_is_refused() -> None:
    data = client_batch(codec=Codec.ZSTD)
    with pytest.raises(UnsupportedCompressionError):
        validate(data, config(), now_ms=T0, min_zstd_ok=False)
    assert validate(data, config(), now_ms=T0, min_zstd_ok=True).data == data


def test_timestamp_before_the_past_limit_is_refused(tmp_path: Path) -> None:
    partition = open_partition(tmp_path, config=config(message_timestamp_before_max_ms=1000))
    with pytest.raises(InvalidTimestampError):
        append(partition, 2, timestamp_ms=T0 - 1001)
    append(partition, 2, timestamp_ms=T0 - 1000)
    assert partition.log_end_offset == 2


def test_record_without_key_is_refused_by_a_compacted_topic(tmp_path: Path) -> None:
    partition = open_partition(tmp_path, config=config(cleanup_policy=frozenset({"compact"})))
    for codec in Codec:
        with pytest.raises(InvalidRecordError, match="key") as refused:
            append(partition, key=None, codec=codec)
        assert [index for index, _ in refused.value.record_errors] == [0]
        append(partition, codec=codec)


# --- written batches ---


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_append_changes_only_base_offset_and_leader_epoch(
    tmp_path: Path, kind: type[bytes | bytearray | memoryview]
) -> None:
    partition = open_partition(tmp_path, leader_epoch=6)
    data = client_batch(3, codec=Codec.LZ4)
    append(partition, 2)
    given = kind(data)
    assert append_batch(partition, given, now_ms=T0) == (2, 4, -1, 0, False)
    assert bytes(given) == data
    stored = fetch_bytes(partition, 2, 1 << 20, UNCOMMITTED, at_least_one=False).records
    header = parse_header(stored)
    assert (header.base_offset, header.leader_epoch) == (2, 6)
    assert stored[16:] == data[16:]
    verify_crc(stored, 0, header)


def test_log_append_time_replaces_the_timestamps_of_every_batch(tmp_path: Path) -> None:
    partition = open_partition(
        tmp_path, config=config(message_timestamp_type="LogAppendTime"), clock=ManualClock(T0)
    )
    flagged = raw(log_append_time=True)
    with pytest.raises(InvalidTimestampError):
        append_batch(partition, flagged, now_ms=T0)
    data = client_batch(2, timestamp_ms=5, producer_id=3)
    assert append_batch(partition, data, now_ms=T0 + 7).log_append_time_ms == T0 + 7
    # The response to a duplicate has the time of the first append.
    again = append_batch(partition, data, now_ms=T0 + 90)
    assert (again.duplicate, again.log_append_time_ms) == (True, T0 + 7)
    partition.append_records([Record(b"k", b"v")], now_ms=T0 + 8)
    partition.append_marker(EndMarker(ProducerStamp(3, 0), True), T0 + 9)
    for header, batch in partition.reader.read_all():
        verify_crc(batch, 0, header)
        assert header.is_log_append_time
    stamps = [
        record.timestamp_ms
        for header, batch in partition.reader.read_all()
        for record in decode_records(batch, 0, header)
    ]
    assert stamps == [T0 + 7, T0 + 7, T0 + 8, T0 + 9]


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("target", ["uncompressed", "gzip", "snappy", "lz4", "zstd", "producer"])
def test_batch_is_stored_with_the_compression_type_of_the_topic(
    tmp_path: Path, codec: Codec, target: str
) -> None:
    partition = open_partition(tmp_path, config=config(compression_type=target))
    data = client_batch(5, codec=codec, producer_id=1)
    append_batch(partition, data, now_ms=T0)
    header, batch = next(partition.reader.read_all())
    expected = {"producer": codec, "uncompressed": Codec.NONE}.get(target)
    assert header.codec == (Codec[target.upper()] if expected is None else expected)
    verify_crc(batch, 0, header)
    assert decode_records(batch, 0, header) == decode_records(data)
    assert append_batch(partition, data, now_ms=T0).duplicate


def test_batch_above_max_message_bytes_after_decompression_is_refused(tmp_path: Path) -> None:
    data = client_batch(1, size=5000, codec=Codec.ZSTD)
    partition = open_partition(
        tmp_path, config=config(compression_type="uncompressed", max_message_bytes=1000)
    )
    with pytest.raises(RecordTooLargeError):
        append_batch(partition, data, now_ms=T0)


def test_coordinator_records_are_appended_with_or_without_a_producer(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    records = [Record(b"a", b"1"), Record(b"b", None)]
    assert partition.append_records(records, now_ms=T0) == (0, 1, -1, 0, False)
    partition.append_records(records, now_ms=T0 + 1, producer=ProducerStamp(4, 2))
    marker(partition, 4, 2, commit=True)
    headers = [header for header, _ in partition.reader.read_all()]
    assert [
        (header.producer_id, header.producer_epoch, header.base_sequence) for header in headers
    ] == [(-1, -1, -1), (4, 2, 0), (4, 2, -1)]
    assert [header.is_transactional for header in headers] == [False, True, True]
    assert [header.is_control for header in headers] == [False, False, True]
    decoded = [
        record
        for header, batch in partition.reader.read_all()
        for record in decode_records(batch, 0, header)
    ][:4]
    assert [
        (record.offset, record.timestamp_ms, record.key, record.value) for record in decoded
    ] == [
        (0, T0, b"a", b"1"),
        (1, T0, b"b", None),
        (2, T0 + 1, b"a", b"1"),
        (3, T0 + 1, b"b", None),
    ]


# --- marks, epochs, listeners ---


def test_stale_leader_epoch_is_fenced_and_a_later_one_is_unknown(tmp_path: Path) -> None:
    partition = open_partition(tmp_path, leader_epoch=5)
    check_leader_epoch(-1, partition.marks.leader_epoch)
    check_leader_epoch(5, partition.marks.leader_epoch)
    with pytest.raises(FencedLeaderEpochError):
        check_leader_epoch(4, partition.marks.leader_epoch)
    with pytest.raises(UnknownLeaderEpochError):
        check_leader_epoch(6, partition.marks.leader_epoch)
    assert partition.reader.offset_for_leader_epoch(5) == (-1, -1)
    assert (partition.reader.end_of_epoch(5), partition.reader.epoch_of(0)) == ((5, 0), -1)
    append(partition, 3)
    assert partition.reader.offset_for_leader_epoch(5) == (5, 3)
    assert partition.reader.offset_for_leader_epoch(2) == (2, 0)
    assert [partition.reader.end_of_epoch(epoch) for epoch in (2, 5, 6)] == [
        (2, 0),
        (5, 3),
        (-1, -1),
    ]
    partition.marks.leader_epoch = 7
    append(partition)
    assert [partition.reader.epoch_of(offset) for offset in range(4)] == [5, 5, 5, 7]


def test_listeners_are_notified_of_moved_marks_until_removed(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    calls: list[tuple[str, int]] = []

    def once() -> None:
        calls.append(("once", partition.high_watermark))
        leave()

    leave = partition.marks.listen(once)
    stay = partition.marks.listen(lambda: calls.append(("stay", partition.high_watermark)))
    append(partition)
    assert calls == [("once", 1), ("stay", 1)]
    marker(partition, 1, commit=True)
    append(partition, producer_id=3)
    calls.clear()
    # A duplicate changes nothing.
    append(partition, producer_id=3)
    assert calls == []
    partition.cleanup.delete_records_before(1)
    partition.truncate_to(2)
    assert calls == [("stay", 3), ("stay", 2)]
    stay()
    stay()
    append(partition)
    assert len(calls) == 2


def test_reader_sees_batches_appended_during_the_read(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition)
    seen = []
    for header, _ in partition.reader.read_all():
        seen.append(header.base_offset)
        if len(seen) < 4:
            append(partition)
    assert seen == [0, 1, 2, 3]


# --- failures ---


@pytest.mark.parametrize("fail", ["write", "sync"])
def test_failed_append_takes_the_partition_offline(tmp_path: Path, fail: str) -> None:
    fs = FaultyDisk()
    partition = open_partition(tmp_path, fs=fs, config=config(flush_messages=1))
    append(partition, producer_id=1)
    before = state_of(partition)
    woken = []
    partition.marks.listen(lambda: woken.append(partition.offline))
    fs.fails = {fail: errno.EIO}
    with pytest.raises(StorageError):
        append(partition, producer_id=1, sequence=1)
    assert isinstance(partition.offline, StorageError)
    assert woken == [partition.offline]
    fs.fails = {}
    # The partition stays offline: even reads fail until the broker restarts and checks the files.
    for call in (
        lambda: append(partition, producer_id=1, sequence=1),
        lambda: fetch_bytes(partition, 0, 100, UNCOMMITTED),
        lambda: partition.append_records([Record(b"k", b"v")], now_ms=T0),
        lambda: marker(partition, 1, commit=True),
        lambda: partition.flushes.run(T0),
        lambda: partition.truncate_to(0),
        lambda: retain(partition, T0),
        lambda: partition.cleanup.delete_records_before(0),
        lambda: list(partition.reader.read_all()),
    ):
        with pytest.raises(StorageError):
            call()
    partition.close()
    assert partition.offline is not None
    again = open_partition(tmp_path, clean=False)
    if fail != "sync":
        assert state_of(again) == before
    assert not append(again, producer_id=1, sequence=1).duplicate or fail == "sync"


@pytest.mark.parametrize("fail", ["no room", "short write"])
@pytest.mark.parametrize("what", ["data", "marker", "roll"])
def test_append_on_a_full_disk_is_refused_and_changes_nothing(
    tmp_path: Path, fail: str, what: str
) -> None:
    fs = FaultyDisk()
    small = config(segment_bytes=300, index_interval_bytes=1, flush_messages=1)
    partition = open_partition(tmp_path, fs=fs, config=small)
    append(partition, producer_id=1, transactional=True)
    if what == "roll":
        while not partition.log.must_roll(len(client_batch()), 10, T0, T0):
            append(partition)
    before = state_of(partition)
    image = crash_image(partition, tmp_path / "image")

    def attempt(partition: Partition) -> Appended:
        if what == "marker":
            return marker(partition, 1, commit=False)
        return append(partition, producer_id=1, sequence=1, transactional=True)

    fs.fails = {"write": errno.ENOSPC} if fail == "no room" else {}
    fs.is_short = fail == "short write"
    for _ in range(2):
        with pytest.raises(NoSpaceError):
            attempt(partition)
    assert partition.offline is None
    assert state_of(partition) == before
    fs.fails, fs.is_short = {}, False
    attempt(partition)
    expected = open_partition(image, config=small, clean=False)
    attempt(expected)
    assert state_of(partition) == state_of(expected)
    partition.close()
    assert state_of(open_partition(tmp_path, clean=True)) == state_of(expected)


def test_append_without_disk_space_for_an_index_is_refused(tmp_path: Path) -> None:
    left = 0

    def allocates(kind: str, _path: str) -> None:
        nonlocal left
        if kind == "allocate":
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, "no space left on device")

    fs = FaultyDisk()
    fs.before = allocates
    partition = open_partition(tmp_path, fs=fs, config=config(index_interval_bytes=1))
    append(partition)
    before = state_of(partition)
    # The first entry needs a disk block for each of two indexes; the disk has no or one free block.
    for blocks in (0, 1):
        left = blocks
        with pytest.raises(NoSpaceError):
            append(partition)
        assert state_of(partition) == before
    left = 2
    for _ in range(10):
        append(partition)
    assert partition.log.active.offset_index.entries == 10


def test_torn_write_that_cannot_be_truncated_takes_the_partition_offline(tmp_path: Path) -> None:
    fs = FaultyDisk()
    partition = open_partition(tmp_path, fs=fs)
    append(partition)
    before = state_of(partition)
    fs.is_short, fs.fails = True, {"truncate": errno.EIO}
    with pytest.raises(StorageError):
        append(partition)
    assert partition.offline is not None
    again = open_partition(tmp_path, clean=False)
    assert state_of(again) == before


def test_failed_read_takes_the_partition_offline(tmp_path: Path) -> None:
    fs = FaultyDisk()
    partition = open_partition(tmp_path, fs=fs)
    append(partition)
    fs.fails = {"read": errno.EIO}
    with pytest.raises(StorageError):
        fetch_bytes(partition, 0, 100, UNCOMMITTED)
    assert partition.offline is not None


def test_failed_close_takes_the_partition_offline(tmp_path: Path) -> None:
    fs = FaultyDisk()
    partition = open_partition(tmp_path, fs=fs)
    append(partition)
    fs.fails = {"sync": errno.EIO}
    with pytest.raises(StorageError):
        partition.close()
    assert partition.offline is not None


# --- flushing ---


def test_flush_messages_syncs_after_that_many_records(tmp_path: Path) -> None:
    fs = FaultyDisk()
    partition = open_partition(tmp_path, fs=fs, config=config(flush_messages=3))

    def count() -> int:
        return sum(step.kind == "sync" for step in fs.steps)

    append(partition, 2)
    assert partition.recovery_point == 0
    append(partition, 1)
    assert partition.recovery_point == 3
    syncs = count()
    append(partition, 2)
    assert (partition.recovery_point, count()) == (3, syncs)
    append(partition, 5)
    assert (partition.recovery_point, count()) == (10, syncs + 1)
    partition.flushes.run(T0)
    assert partition.recovery_point == 10
    assert count() == syncs + 1


def test_flush_ms_syncs_after_that_time(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    partition = open_partition(tmp_path, clock=clock, config=config(flush_ms=100))
    append(partition, now_ms=T0 + 99)
    assert partition.recovery_point == 0
    assert not partition.flushes.run_if_due(T0 + 99)
    clock.advance(100)
    assert partition.flushes.run_if_due(T0 + 100)
    assert partition.recovery_point == 1
    assert not partition.flushes.run_if_due(T0 + 300)
    append(partition, now_ms=T0 + 250)
    assert partition.recovery_point == 2


# --- removal ---


def test_deleted_partition_leaves_no_files(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition)
    other = open_partition(tmp_path, name="t" * 249)
    append(other)
    woken = []
    partition.marks.listen(lambda: woken.append(1))
    delete(partition)
    delete(other)
    assert woken == [1]
    assert not list(tmp_path.iterdir())
    with pytest.raises(StorageError):
        append(partition)


# --- the largest timestamp of a batch after other records have been removed ---


def test_max_timestamp_offset_ignores_records_below_the_log_start(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    data = encode_batch([LogRecord(at, T0 + 9 - at, b"k", b"v") for at in range(3)])
    append_batch(partition, data, now_ms=T0)
    append(partition, timestamp_ms=T0 + 3)
    partition.flushes.roll(T0)
    append(partition, timestamp_ms=T0 + 8)
    found = []
    for start in range(4):
        partition.cleanup.delete_records_before(start)
        latest = finish(partition.reader.max_timestamp_offset(UNCOMMITTED))
        assert latest is not None
        found.append(latest[:2])
    assert found == [(0, T0 + 9), (1, T0 + 8), (4, T0 + 8), (4, T0 + 8)]
    partition.cleanup.delete_records_before(5)
    assert finish(partition.reader.max_timestamp_offset(UNCOMMITTED)) is None
