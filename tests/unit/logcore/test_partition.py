from __future__ import annotations

import errno
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logcore.batch import (
    LogRecord,
    decode_records,
    encode_batch,
    end_marker,
    iter_headers,
    parse_header,
    verify_crc,
)
from logcore.clock import ManualClock
from logcore.compression import Codec
from logcore.errors import (
    CorruptRecordError,
    FencedLeaderEpochError,
    InvalidRecordError,
    InvalidTimestampError,
    NotOneBatchError,
    OffsetOutOfRangeError,
    RecordTooLargeError,
    StorageError,
    UnknownLeaderEpochError,
    UnsupportedCompressionError,
)
from logcore.fs import OsFileSystem, ReadableBuffer
from logcore.machine import ProducerStamp, Record
from logcore.partition import Isolation, Partition
from tests.unit.logcore.partition_driver import (
    T0,
    append,
    client_batch,
    config,
    crash_image,
    marker,
    open_partition,
    read_log,
    state_of,
)

UNCOMMITTED, COMMITTED = Isolation.READ_UNCOMMITTED, Isolation.READ_COMMITTED


# --- opening ---


def test_a_new_partition(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    assert partition.log_start_offset == partition.log_end_offset == partition.high_watermark == 0
    assert partition.last_stable_offset == 0
    assert partition.fetch(0, 100, COMMITTED, at_least_one=True) == (b"", 0, 0, 0, ())
    assert [one.name for one in (tmp_path / "orders-0").iterdir()] == [f"{0:020d}.log"]


def test_topic_id_is_on_disk_before_the_first_batch(tmp_path: Path) -> None:
    class NoLogWrites(OsFileSystem):
        def write(self, handle: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
            if len(buffers) > 1:
                raise OSError(errno.EIO, "no")
            return super().write(handle, buffers, position)

    partition = open_partition(tmp_path, fs=NoLogWrites())
    with pytest.raises(StorageError):
        append(partition)
    text = (tmp_path / "orders-0" / "partition.metadata").read_text()
    assert text == "version: 0\ntopic_id: AQIDBAUGBwgJCgsMDQ4PEA"


def test_the_directory_of_another_topic_id_is_refused(tmp_path: Path) -> None:
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


def test_damaged_partition_metadata_is_written_anew(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition)
    partition.close()
    path = tmp_path / "orders-0" / "partition.metadata"
    good = path.read_bytes()
    path.write_bytes(b"")
    append(open_partition(tmp_path))
    assert path.read_bytes() == good


def test_offsets_go_on_after_a_restart(tmp_path: Path) -> None:
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


# --- what a client may append (kafka: LogValidator) ---


def raw(**fields: object) -> bytes:
    values: dict[str, object] = {"records": [LogRecord(0, T0, b"k", b"v")], **fields}
    return encode_batch(values.pop("records"), **values)  # type: ignore[arg-type]


def patched(data: bytes, position: int, value: bytes) -> bytes:
    """Change header fields and set the CRC right again."""
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
def test_refused(tmp_path: Path, case: str) -> None:
    data, error = REFUSED[case]
    partition = open_partition(tmp_path)
    with pytest.raises(error):
        partition.append(data, now_ms=T0, transaction_verified=True)
    assert (partition.log_end_offset, partition.size_bytes, partition.producers()) == (0, 0, [])


def test_future_by_exactly_the_limit_is_fine(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition, timestamp_ms=T0 + 3_600_000)


def test_largest_batch(tmp_path: Path) -> None:
    data = client_batch()
    partition = open_partition(tmp_path, config=config(max_message_bytes=len(data)))
    partition.append(data, now_ms=T0)
    partition.config = config(max_message_bytes=len(data) - 1)
    with pytest.raises(RecordTooLargeError):
        partition.append(data, now_ms=T0)


def test_zstd_needs_a_recent_request(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    data = client_batch(codec=Codec.ZSTD)
    with pytest.raises(UnsupportedCompressionError):
        partition.append(data, now_ms=T0, min_zstd_ok=False)
    partition.append(data, now_ms=T0)


def test_old_timestamps(tmp_path: Path) -> None:
    partition = open_partition(tmp_path, config=config(message_timestamp_before_max_ms=1000))
    with pytest.raises(InvalidTimestampError):
        append(partition, 2, timestamp_ms=T0 - 1001)
    append(partition, 2, timestamp_ms=T0 - 1000)


def test_a_compacted_topic_needs_keys(tmp_path: Path) -> None:
    partition = open_partition(tmp_path, config=config(cleanup_policy=frozenset({"compact"})))
    for codec in Codec:
        with pytest.raises(InvalidRecordError, match="key") as refused:
            append(partition, key=None, codec=codec)
        assert [index for index, _ in refused.value.record_errors] == [0]
        append(partition, codec=codec)


# --- what is written ---


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_only_the_place_of_a_batch_is_changed(
    tmp_path: Path, kind: type[bytes | bytearray | memoryview]
) -> None:
    partition = open_partition(tmp_path, leader_epoch=6)
    data = client_batch(3, codec=Codec.LZ4)
    append(partition, 2)
    given = kind(data)
    assert partition.append(given, now_ms=T0) == (2, 4, -1, 0, False)
    assert bytes(given) == data
    stored = partition.fetch(2, 1 << 20, UNCOMMITTED, at_least_one=False).records
    header = parse_header(stored)
    assert (header.base_offset, header.leader_epoch) == (2, 6)
    assert stored[16:] == data[16:]
    verify_crc(stored, 0, header)


def test_log_append_time(tmp_path: Path) -> None:
    partition = open_partition(
        tmp_path, config=config(message_timestamp_type="LogAppendTime"), clock=ManualClock(T0)
    )
    flagged = raw(log_append_time=True)
    with pytest.raises(InvalidTimestampError):
        partition.append(flagged, now_ms=T0)
    data = client_batch(2, timestamp_ms=5, producer_id=3)
    assert partition.append(data, now_ms=T0 + 7).log_append_time_ms == T0 + 7
    # A retry is told the time of the first.
    again = partition.append(data, now_ms=T0 + 90)
    assert (again.duplicate, again.log_append_time_ms) == (True, T0 + 7)
    partition.append_records([Record(b"k", b"v")], now_ms=T0 + 8)
    partition.append_marker(ProducerStamp(3, 0), commit=True, coordinator_epoch=0, now_ms=T0 + 9)
    for header, batch in partition.read_all():
        verify_crc(batch, 0, header)
        assert header.is_log_append_time
    stamps = [
        one.timestamp_ms
        for header, batch in partition.read_all()
        for one in decode_records(batch, 0, header)
    ]
    assert stamps == [T0 + 7, T0 + 7, T0 + 8, T0 + 9]


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("target", ["uncompressed", "gzip", "snappy", "lz4", "zstd", "producer"])
def test_compression_type(tmp_path: Path, codec: Codec, target: str) -> None:
    partition = open_partition(tmp_path, config=config(compression_type=target))
    data = client_batch(5, codec=codec, producer_id=1)
    partition.append(data, now_ms=T0)
    header, batch = next(partition.read_all())
    expected = {"producer": codec, "uncompressed": Codec.NONE}.get(target)
    assert header.codec == (Codec[target.upper()] if expected is None else expected)
    verify_crc(batch, 0, header)
    assert decode_records(batch, 0, header) == decode_records(data)
    assert partition.append(data, now_ms=T0).duplicate


def test_a_batch_that_grows_beyond_the_limit_when_inflated(tmp_path: Path) -> None:
    data = client_batch(1, size=5000, codec=Codec.ZSTD)
    partition = open_partition(
        tmp_path, config=config(compression_type="uncompressed", max_message_bytes=1000)
    )
    with pytest.raises(RecordTooLargeError):
        partition.append(data, now_ms=T0)


def test_coordinator_records(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    records = [Record(b"a", b"1"), Record(b"b", None)]
    assert partition.append_records(records, now_ms=T0) == (0, 1, -1, 0, False)
    partition.append_records(records, now_ms=T0 + 1, producer=ProducerStamp(4, 2))
    marker(partition, 4, 2, commit=True)
    headers = [header for header, _ in partition.read_all()]
    assert [(one.producer_id, one.producer_epoch, one.base_sequence) for one in headers] == [
        (-1, -1, -1), (4, 2, 0), (4, 2, -1)
    ]  # fmt: skip
    assert [one.is_transactional for one in headers] == [False, True, True]
    assert [one.is_control for one in headers] == [False, False, True]
    decoded = [
        one for header, batch in partition.read_all() for one in decode_records(batch, 0, header)
    ][:4]
    assert [(one.offset, one.timestamp_ms, one.key, one.value) for one in decoded] == [
        (0, T0, b"a", b"1"), (1, T0, b"b", None), (2, T0 + 1, b"a", b"1"), (3, T0 + 1, b"b", None)
    ]  # fmt: skip


# --- marks, epochs, listeners ---


def test_leader_epoch_checks(tmp_path: Path) -> None:
    partition = open_partition(tmp_path, leader_epoch=5)
    partition.check_leader_epoch(-1)
    partition.check_leader_epoch(5)
    with pytest.raises(FencedLeaderEpochError):
        partition.check_leader_epoch(4)
    with pytest.raises(UnknownLeaderEpochError):
        partition.check_leader_epoch(6)
    assert partition.offset_for_leader_epoch(5) == (-1, -1)
    append(partition, 3)
    assert partition.offset_for_leader_epoch(5) == (5, 3)
    assert partition.offset_for_leader_epoch(2) == (2, 0)


def test_listeners(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    calls: list[tuple[str, int]] = []

    def once() -> None:
        calls.append(("once", partition.high_watermark))
        leave()

    leave = partition.listen(once)
    stay = partition.listen(lambda: calls.append(("stay", partition.high_watermark)))
    append(partition)
    assert calls == [("once", 1), ("stay", 1)]
    marker(partition, 1, commit=True)
    append(partition, producer_id=3)
    calls.clear()
    # A duplicate changes nothing.
    append(partition, producer_id=3)
    assert calls == []
    partition.delete_records_before(1)
    partition.truncate_to(2)
    assert calls == [("stay", 3), ("stay", 2)]
    stay()
    stay()
    append(partition)
    assert len(calls) == 2


def test_reading_goes_on_while_batches_are_appended(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition)
    seen = []
    for header, _ in partition.read_all():
        seen.append(header.base_offset)
        if len(seen) < 4:
            append(partition)
    assert seen == [0, 1, 2, 3]


# --- failures ---


class FailingFileSystem(OsFileSystem):
    """Does as it should until told otherwise."""

    def __init__(self) -> None:
        self.fail = ""

    def write(self, handle: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        if self.fail == "write":
            raise OSError(errno.ENOSPC, "no space left on device")
        if self.fail == "short write":
            return super().write(handle, (b"".join(map(bytes, buffers))[:-1],), position)
        return super().write(handle, buffers, position)

    def sync(self, handle: int) -> None:
        if self.fail == "sync":
            raise OSError(errno.EIO, "input/output error")
        super().sync(handle)

    def read(self, handle: int, count: int, position: int) -> bytes:
        if self.fail == "read":
            raise OSError(errno.EIO, "input/output error")
        return super().read(handle, count, position)


@pytest.mark.parametrize("fail", ["write", "short write", "sync"])
def test_a_failed_append_takes_the_partition_off_line(tmp_path: Path, fail: str) -> None:
    fs = FailingFileSystem()
    partition = open_partition(tmp_path, fs=fs, config=config(flush_messages=1))
    append(partition, producer_id=1)
    before = state_of(partition)
    woken = []
    partition.listen(lambda: woken.append(partition.offline))
    fs.fail = fail
    with pytest.raises(StorageError):
        append(partition, producer_id=1, sequence=1)
    assert isinstance(partition.offline, StorageError)
    assert woken == [partition.offline]
    fs.fail = ""
    # For good: not even reads are served until a restart has looked at the files.
    for call in (
        lambda: append(partition, producer_id=1, sequence=1),
        lambda: partition.fetch(0, 100, UNCOMMITTED, at_least_one=True),
        lambda: partition.append_records([Record(b"k", b"v")], now_ms=T0),
        lambda: marker(partition, 1, commit=True),
        partition.flush,
        lambda: partition.truncate_to(0),
        lambda: partition.retention(T0),
        lambda: partition.delete_records_before(0),
        lambda: list(partition.read_all()),
    ):
        with pytest.raises(StorageError):
            call()
    partition.close()
    assert partition.offline is not None
    again = open_partition(tmp_path, clean=False)
    if fail != "sync":
        assert state_of(again) == before
    assert not append(again, producer_id=1, sequence=1).duplicate or fail == "sync"


def test_a_failed_read_takes_the_partition_off_line(tmp_path: Path) -> None:
    fs = FailingFileSystem()
    partition = open_partition(tmp_path, fs=fs)
    append(partition)
    fs.fail = "read"
    with pytest.raises(StorageError):
        partition.fetch(0, 100, UNCOMMITTED, at_least_one=True)
    assert partition.offline is not None


def test_a_failed_close_is_no_clean_shutdown(tmp_path: Path) -> None:
    fs = FailingFileSystem()
    partition = open_partition(tmp_path, fs=fs)
    append(partition)
    fs.fail = "sync"
    with pytest.raises(StorageError):
        partition.close()
    assert partition.offline is not None


# --- flushing ---


class CountingFileSystem(OsFileSystem):
    def __init__(self) -> None:
        self.syncs = 0

    def sync(self, handle: int) -> None:
        self.syncs += 1
        super().sync(handle)


def test_flush_messages(tmp_path: Path) -> None:
    fs = CountingFileSystem()
    partition = open_partition(tmp_path, fs=fs, config=config(flush_messages=3))
    append(partition, 2)
    assert partition.recovery_point == 0
    append(partition, 1)
    assert partition.recovery_point == 3
    syncs = fs.syncs
    append(partition, 2)
    assert (partition.recovery_point, fs.syncs) == (3, syncs)
    append(partition, 5)
    assert (partition.recovery_point, fs.syncs) == (10, syncs + 1)
    assert partition.flush() == 10
    assert fs.syncs == syncs + 1


def test_flush_ms(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    partition = open_partition(tmp_path, clock=clock, config=config(flush_ms=100))
    append(partition, now_ms=T0 + 99)
    assert partition.recovery_point == 0
    assert not partition.flush_if_due(T0 + 99)
    clock.advance(100)
    assert partition.flush_if_due(T0 + 100)
    assert partition.recovery_point == 1
    assert not partition.flush_if_due(T0 + 300)
    append(partition, now_ms=T0 + 250)
    assert partition.recovery_point == 2


# --- removal ---


def test_delete_directory(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition)
    other = open_partition(tmp_path, name="t" * 249)
    append(other)
    woken = []
    partition.listen(lambda: woken.append(1))
    partition.delete_directory()
    other.delete_directory()
    assert woken == [1]
    assert not list(tmp_path.iterdir())
    with pytest.raises(StorageError):
        append(partition)


# --- fetch and list-offsets against a model ---


class DumbLog:
    """Every record in a list; every answer by going over it."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int, bytes]] = []
        self.records: list[tuple[int, int, int]] = []
        self.start = self.end = 0
        self.open: dict[int, int] = {}

    def take(self, data: bytes, *, is_open: int | None = None) -> None:
        header = parse_header(data)
        for record in decode_records(data):
            self.records.append((self.end + record.offset, record.timestamp_ms, 0))
        if is_open is not None:
            self.open.setdefault(is_open, self.end)
        last = self.end + header.last_offset_delta
        place = self.end.to_bytes(8, "big") + data[8:12] + b"\x00" * 4
        self.batches.append((self.end, last, place + data[16:]))
        self.end = last + 1

    def limit(self, isolation: Isolation) -> int:
        stable = min([self.end, *self.open.values()])
        return max(stable, self.start) if isolation is COMMITTED else self.end

    def fetch(self, offset: int, max_bytes: int, isolation: Isolation, *, one: bool) -> bytes:
        out = b""
        for base, last, data in self.batches:
            if last < offset or base >= self.limit(isolation) or offset >= self.limit(isolation):
                continue
            if len(out) + len(data) > max_bytes and not (one and not out):
                break
            out += data
        return out

    def by_time(self, target: int, isolation: Isolation) -> tuple[int, int, int] | None:
        for record in self.records:
            if record[1] >= target and record[0] >= self.start:
                return record if record[0] < self.limit(isolation) else None
        return None


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("plain"), st.integers(1, 4), st.integers(-3, 20)),
        st.tuples(st.just("data"), st.integers(1, 3), st.integers(-3, 20)),
        st.tuples(st.just("commit"), st.just(0), st.just(0)),
        st.tuples(st.sampled_from(["roll", "restart", "crash"]), st.just(0), st.just(0)),
        st.tuples(st.just("delete"), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("codec"), st.sampled_from(list(Codec)), st.just(0)),
    ),
    max_size=25,
)
QUERIES = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.integers(0, 900),
        st.sampled_from(list(Isolation)),
        st.booleans(),
        st.integers(-10, 130),
    ),
    min_size=3,
    max_size=12,
)


@settings(deadline=None, max_examples=120)
@given(STEPS, QUERIES)
def test_fetch_and_list_offsets_equal_the_model(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, int, int]],
    queries: list[tuple[int, int, Isolation, bool, int]],
) -> None:
    root = tmp_path_factory.mktemp("model")
    small = config(index_interval_bytes=150)
    partition, model = open_partition(root, config=small), DumbLog()
    now, sequence, codec = T0, 0, Codec.NONE
    for kind, count, change in steps:
        if kind in {"plain", "data"}:
            now = max(T0, now + change)
            fields: dict[str, object] = {"timestamp_ms": now, "codec": codec, "size": 40}
            if kind == "data":
                fields |= {"producer_id": 1, "sequence": sequence, "transactional": True}
                sequence += count
            data = client_batch(count, **fields)  # type: ignore[arg-type]
            partition.append(data, now_ms=now, transaction_verified=True)
            model.take(data, is_open=1 if kind == "data" else None)
        elif kind == "commit":
            marker(partition, 1, commit=True)
            model.take(
                end_marker(
                    commit=True,
                    producer_id=1,
                    producer_epoch=0,
                    coordinator_epoch=0,
                    timestamp_ms=T0,
                )
            )
            model.open.clear()
        elif kind == "codec":
            codec = Codec(count)
        elif kind == "roll":
            partition._roll(now)
        elif kind == "delete":
            target = min(count, model.end)
            partition.delete_records_before(target)
            model.start = max(model.start, target)
        else:
            if kind == "crash":
                root = crash_image(partition, tmp_path_factory.mktemp("crash"))
            partition.close()
            partition = open_partition(
                root, clean=kind == "restart", config=small, log_start_offset=model.start
            )
    check_queries(partition, model, queries)
    partition.close()


def check_queries(
    partition: Partition,
    model: DumbLog,
    queries: list[tuple[int, int, Isolation, bool, int]],
) -> None:
    assert (partition.log_start_offset, partition.log_end_offset) == (model.start, model.end)
    assert [data for _, data in read_log(partition)] == [
        data for _, last, data in model.batches if last >= model.start
    ]
    for offset, max_bytes, isolation, one, after in queries:
        assert partition.last_stable_offset == model.limit(COMMITTED)
        if not model.start <= offset <= model.end:
            with pytest.raises(OffsetOutOfRangeError):
                partition.fetch(offset, max_bytes, isolation, at_least_one=one)
        else:
            fetched = partition.fetch(offset, max_bytes, isolation, at_least_one=one)
            wanted = model.fetch(offset, max_bytes, isolation, one=one)
            # A fetch ends with its segment, so it may come short, by whole batches.
            assert wanted.startswith(fetched.records)
            assert bool(fetched.records) == bool(wanted)
            if fetched.records != wanted:
                *_, (_, header) = iter_headers(fetched.records)
                assert header.next_offset in [one.base_offset for one in partition._log.segments]
            everything = model.fetch(offset, 1 << 30, isolation, one=True)
            assert partition.available_bytes(offset, isolation) == len(everything)
        found = partition.offset_for_timestamp(T0 + after, isolation)
        assert found == model.by_time(T0 + after, isolation)
    visible = [one for one in model.records if one[0] >= model.start]
    latest = max((one[1] for one in visible), default=-1)
    # A batch that the log start cuts through counts whole.
    if model.start in {0, model.end, *(base for base, _, _ in model.batches)}:
        expected = next((one for one in visible if one[1] == latest), None)
        assert partition.max_timestamp_offset() == expected
