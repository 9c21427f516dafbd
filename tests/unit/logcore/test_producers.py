from __future__ import annotations

import struct
from pathlib import Path

import pytest
from crc32c import crc32c

from fencepost.logcore.errors import (
    InvalidProducerEpochError,
    InvalidTxnStateError,
    OutOfOrderSequenceError,
    TransactionCoordinatorFencedError,
)
from fencepost.logcore.fs import OsFileSystem
from fencepost.logcore.machine import EndMarker, ProducerStamp
from fencepost.logcore.producer_snapshot import CorruptSnapshotError, decode_snapshot
from fencepost.logcore.producers import ProducerStateManager
from tests.support.clock import ManualClock
from tests.support.partitions import append_batch
from tests.support.stalls import LoopWatch
from tests.unit.logcore.partition_driver import (
    T0,
    append,
    client_batch,
    crash_image,
    marker,
    open_partition,
    state_of,
)

PID = 7
MAX_SEQUENCE = 0x7FFFFFFF


# --- sequences (kafka: ProducerAppendInfo) ---


@pytest.mark.parametrize(
    ("epoch", "sequence", "error"),
    [
        (3, 2, None),
        (3, 3, OutOfOrderSequenceError),
        (3, 1, OutOfOrderSequenceError),
        (3, 0, OutOfOrderSequenceError),
        (4, 0, None),
        (4, 2, OutOfOrderSequenceError),
        (2, 2, InvalidProducerEpochError),
        (2, 0, InvalidProducerEpochError),
    ],
)
def test_second_batch_needs_the_next_sequence_and_no_older_epoch(
    tmp_path: Path, epoch: int, sequence: int, error: type[Exception] | None
) -> None:
    partition = open_partition(tmp_path)
    append(partition, 2, producer_id=PID, epoch=3, sequence=0)
    if error is None:
        assert append(partition, producer_id=PID, epoch=epoch, sequence=sequence).base_offset == 2
    else:
        with pytest.raises(error):
            append(partition, producer_id=PID, epoch=epoch, sequence=sequence)
        assert partition.log_end_offset == 2
        # A refused batch changes no state.
        assert append(partition, producer_id=PID, epoch=3, sequence=2).base_offset == 2


@pytest.mark.parametrize("sequence", [0, 5, MAX_SEQUENCE])
def test_unknown_producer_may_begin_with_any_sequence(tmp_path: Path, sequence: int) -> None:
    partition = open_partition(tmp_path)
    append(partition, producer_id=PID, epoch=9, sequence=sequence)
    (known,) = partition.producers.view()
    assert (known.producer_id, known.producer_epoch, known.last_sequence) == (PID, 9, sequence)


def test_sequence_wraps_to_0_after_the_maximum(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition, 3, producer_id=PID, sequence=MAX_SEQUENCE - 1)
    assert next(partition.producers.view()).last_sequence == 0
    append(partition, producer_id=PID, sequence=1)
    other = open_partition(tmp_path, name="other")
    append(other, producer_id=PID, sequence=MAX_SEQUENCE)
    with pytest.raises(OutOfOrderSequenceError):
        append(other, producer_id=PID, sequence=1)
    append(other, producer_id=PID, sequence=0)


def test_verified_transaction_of_version_2_begins_with_sequence_0(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    late = client_batch(producer_id=PID, sequence=3, transactional=True)
    with pytest.raises(OutOfOrderSequenceError):
        append_batch(partition, late, now_ms=T0, transaction_verified=True, transaction_version=2)
    append_batch(partition, late, now_ms=T0, transaction_verified=True, transaction_version=1)
    other = open_partition(tmp_path, name="other")
    first = client_batch(producer_id=PID, sequence=0, transactional=True)
    append_batch(other, first, now_ms=T0, transaction_verified=True, transaction_version=2)


def test_retry_of_any_of_the_last_five_batches_is_a_duplicate(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    sent = []
    for at in range(7):
        data = client_batch(2, producer_id=PID, sequence=2 * at)
        sent.append((data, append_batch(partition, data, now_ms=T0)))
    for data, first in sent[2:]:
        again = append_batch(partition, data, now_ms=T0)
        # With either timestamp type, the response to a duplicate has its append time
        # (LogAppendInfo).
        assert again == first._replace(duplicate=True, log_append_time_ms=T0 + 1)
    for data, _ in sent[:2]:
        with pytest.raises(OutOfOrderSequenceError):
            append_batch(partition, data, now_ms=T0)
    assert partition.log_end_offset == 14


def test_new_producer_epoch_begins_a_new_window(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition, producer_id=PID, epoch=0, sequence=0)
    append(partition, producer_id=PID, epoch=1, sequence=0)
    with pytest.raises(InvalidProducerEpochError):
        append(partition, producer_id=PID, epoch=0, sequence=0)
    assert append(partition, producer_id=PID, epoch=1, sequence=0).duplicate


def test_batch_with_other_sequence_bounds_is_no_duplicate(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition, 3, producer_id=PID, sequence=0)
    with pytest.raises(OutOfOrderSequenceError):
        append(partition, 2, producer_id=PID, sequence=0)
    with pytest.raises(OutOfOrderSequenceError):
        append(partition, 2, producer_id=PID, sequence=1)


# --- transactions ---


def test_transaction_that_begins_without_verification_is_refused(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    data = [client_batch(producer_id=PID, sequence=at, transactional=True) for at in range(4)]
    with pytest.raises(InvalidTxnStateError):
        append_batch(partition, data[0], now_ms=T0)
    assert list(partition.producers.view()) == []
    append_batch(partition, data[0], now_ms=T0, transaction_verified=True)
    assert partition.producers.has_open_transaction(PID, 0)
    append_batch(partition, data[1], now_ms=T0)
    assert not partition.producers.has_open_transaction(PID, 1)
    marker(partition, PID, commit=True)
    assert not partition.producers.has_open_transaction(PID, 0)
    # A batch of the former transaction arrives after the transaction's marker.
    with pytest.raises(InvalidTxnStateError):
        append_batch(partition, data[2], now_ms=T0)
    # A retry of an appended batch needs no verification.
    assert append_batch(partition, data[1], now_ms=T0).duplicate


def test_kafka_19690_expired_producer_gets_the_error_of_its_epoch(tmp_path: Path) -> None:
    """The marker that the coordinator wrote after the timeout has the next epoch."""
    partition = open_partition(tmp_path)
    data = [client_batch(producer_id=PID, sequence=at, transactional=True) for at in range(2)]
    append_batch(partition, data[0], now_ms=T0, transaction_verified=True)
    marker(partition, PID, 1, commit=False)
    with pytest.raises(InvalidProducerEpochError):
        append_batch(partition, data[1], now_ms=T0)


def test_open_transaction_refuses_plain_batches_of_its_producer(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition, producer_id=PID, transactional=True)
    with pytest.raises(InvalidTxnStateError):
        append(partition, producer_id=PID, sequence=1)
    append(partition, producer_id=8)


def test_newer_epoch_keeps_the_transaction_open_until_its_marker(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition, producer_id=PID, transactional=True)
    append(partition, producer_id=PID, epoch=1, transactional=True)
    assert partition.last_stable_offset == 0
    marker(partition, PID, 1, commit=False)
    assert partition.last_stable_offset == partition.log_end_offset


def test_coordinator_records_skip_the_sequence_but_not_the_epoch(tmp_path: Path) -> None:
    from fencepost.logcore.machine import Record

    partition = open_partition(tmp_path)
    records = [Record(b"k", b"v")]
    for _ in range(3):
        partition.append_records(records, now_ms=T0, producer=ProducerStamp(PID, 1))
    assert partition.last_stable_offset == 0
    with pytest.raises(InvalidProducerEpochError):
        partition.append_records(records, now_ms=T0, producer=ProducerStamp(PID, 0))
    marker(partition, PID, 1, commit=True)
    assert partition.last_stable_offset == partition.log_end_offset == 4


# --- markers (kafka: ProducerAppendInfo.appendEndTxnMarker) ---


@pytest.mark.parametrize(
    ("current", "epoch", "version", "is_open", "error"),
    [
        (5, 5, 0, True, None),
        (5, 5, 0, False, None),
        (5, 6, 0, True, None),
        (5, 4, 0, True, InvalidProducerEpochError),
        (5, 4, 0, False, InvalidProducerEpochError),
        (5, 6, 2, True, None),
        (5, 5, 2, True, InvalidProducerEpochError),
        (5, 5, 2, False, None),
        (5, 4, 2, False, InvalidProducerEpochError),
        (32767, 32767, 2, True, None),
    ],
)
def test_marker_with_a_stale_epoch_for_its_transaction_version_is_refused(
    tmp_path: Path,
    current: int,
    epoch: int,
    version: int,
    is_open: bool,
    error: type[Exception] | None,
) -> None:
    partition = open_partition(tmp_path)
    append(partition, producer_id=PID, epoch=current, transactional=True)
    if not is_open:
        marker(partition, PID, current, commit=True)
    end = partition.log_end_offset
    if error is None:
        marker(partition, PID, epoch, commit=True, version=version)
        assert partition.last_stable_offset == partition.log_end_offset == end + 1
        assert next(partition.producers.view()).producer_epoch == epoch
    else:
        with pytest.raises(error):
            marker(partition, PID, epoch, commit=True, version=version)
        assert partition.log_end_offset == end


def test_marker_of_an_older_coordinator_epoch_is_fenced(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    stamp = ProducerStamp(PID, 0)
    partition.append_marker(EndMarker(stamp, True, 4), T0)
    with pytest.raises(TransactionCoordinatorFencedError):
        partition.append_marker(EndMarker(stamp, True, 3), T0)
    partition.append_marker(EndMarker(stamp, True, 4), T0)
    assert next(partition.producers.view()).coordinator_epoch == 4


def test_marker_for_an_unknown_producer_creates_its_state(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    marker(partition, PID, 3, commit=False)
    state = next(partition.producers.view())
    assert (state.producer_id, state.producer_epoch, state.last_sequence) == (PID, 3, -1)
    # The abort of an empty transaction is irrelevant to readers.
    assert partition.log.active.txn_index.entries == []
    with pytest.raises(OutOfOrderSequenceError):
        append(partition, producer_id=PID, epoch=3, sequence=1)
    append(partition, producer_id=PID, epoch=3, sequence=0)


def test_window_survives_a_marker_of_the_same_epoch_only(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition, producer_id=PID, transactional=True)
    marker(partition, PID, 0, commit=True)
    append(partition, producer_id=PID, sequence=1, transactional=True)
    marker(partition, PID, 1, commit=True, version=2)
    with pytest.raises(OutOfOrderSequenceError):
        append(partition, producer_id=PID, epoch=1, sequence=2, transactional=True)
    append(partition, producer_id=PID, epoch=1, sequence=0, transactional=True)


def test_aborted_entry_carries_the_stable_offset_behind_it(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition, producer_id=1, transactional=True)  # 0
    append(partition, producer_id=2, transactional=True)  # 1
    marker(partition, 1, commit=False)  # 2
    marker(partition, 2, commit=False)  # 3
    assert partition.log.active.txn_index.entries == [(1, 0, 2, 1), (2, 1, 3, 4)]


# --- snapshots ---


def producers(path: Path) -> ProducerStateManager:
    return ProducerStateManager(OsFileSystem(), str(path))


def test_snapshot_file_has_kafkas_format(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition, 3, producer_id=PID, epoch=2, sequence=10, timestamp_ms=5000)
    append(partition, 2, producer_id=8, transactional=True, timestamp_ms=6000)
    partition.append_marker(EndMarker(ProducerStamp(9, 1), True, 4), 7000)
    partition.close()
    raw = (tmp_path / "orders-0" / f"{6:020d}.snapshot").read_bytes()
    body = struct.pack(">i", 3)
    body += struct.pack(">qhiqiqiq", PID, 2, 12, 2, 2, 5002, -1, -1)
    body += struct.pack(">qhiqiqiq", 8, 0, 1, 4, 1, 6001, -1, 3)
    body += struct.pack(">qhiqiqiq", 9, 1, -1, -1, 0, 7000, 4, -1)
    assert raw == struct.pack(">hI", 1, crc32c(body)) + body


def test_every_flipped_bit_of_a_snapshot_is_detected(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition, producer_id=PID)
    partition.close()
    raw = (tmp_path / "orders-0" / f"{1:020d}.snapshot").read_bytes()
    assert len(decode_snapshot(raw)) == 1
    for at in range(len(raw) * 8):
        damaged = bytearray(raw)
        damaged[at // 8] ^= 1 << at % 8
        with pytest.raises(CorruptSnapshotError):
            decode_snapshot(bytes(damaged))
    for size in range(len(raw)):
        with pytest.raises(CorruptSnapshotError):
            decode_snapshot(raw[:size])


@pytest.mark.parametrize("damage", [1, 2])
def test_corrupt_snapshot_falls_back_to_the_next_older_one(tmp_path: Path, damage: int) -> None:
    partition = open_partition(tmp_path)
    for at in range(3):
        append(partition, producer_id=PID, sequence=at, transactional=True)
        append(partition, producer_id=100 + at)
        partition.flushes.roll(T0)
    append(partition, producer_id=PID, sequence=3, transactional=True)
    before = state_of(partition)
    partition.close()
    snapshots = sorted((tmp_path / "orders-0").glob("*.snapshot"))
    assert [int(snapshot.stem) for snapshot in snapshots] == [2, 4, 6, 7]
    for snapshot in snapshots[-damage:]:
        snapshot.write_bytes(snapshot.read_bytes()[:-1] + b"\x01")
    again = open_partition(tmp_path)
    assert state_of(again) == before
    assert not snapshots[-1].exists()
    assert append_batch(
        again, client_batch(producer_id=PID, sequence=3, transactional=True), now_ms=T0
    ).duplicate


def test_replay_restores_the_window_of_the_last_five_batches(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    sent = [client_batch(producer_id=PID, sequence=at) for at in range(7)]
    for data in sent:
        append_batch(partition, data, now_ms=T0)
    replayed = open_partition(crash_image(partition, tmp_path / "crash"), clean=False)
    again = [append_batch(replayed, data, now_ms=T0).base_offset for data in sent[2:]]
    assert again == [2, 3, 4, 5, 6]
    partition.close()
    # After a clean shutdown, the last batch is known without reading the log.
    loaded = open_partition(tmp_path)
    assert append_batch(loaded, sent[6], now_ms=T0).duplicate
    with pytest.raises(OutOfOrderSequenceError):
        append_batch(loaded, sent[5], now_ms=T0)


def test_stray_snapshots_are_removed_but_for_the_newest(tmp_path: Path) -> None:
    manager = producers(tmp_path)
    for offset in (5, 10, 12, 15):
        manager.map_end_offset = offset
        manager.take_snapshot()
    manager.remove_stray_snapshots({0, 10})
    assert manager.snapshot_offsets == {10, 15}
    assert sorted(int(path.stem) for path in tmp_path.iterdir()) == [10, 15]
    manager.remove_stray_snapshots({0, 20})
    assert manager.snapshot_offsets == set()


# --- expiry ---


def test_idle_producers_expire_unless_a_transaction_is_open(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition, producer_id=1, timestamp_ms=T0)
    append(partition, producer_id=2, timestamp_ms=T0, transactional=True)
    append(partition, producer_id=3, timestamp_ms=T0 + 50)
    assert partition.producers.expire(T0 + 99, 100) == 0
    assert partition.producers.expire(T0 + 100, 100) == 1
    assert [producer.producer_id for producer in partition.producers.view()] == [2, 3]
    append(partition, producer_id=1, sequence=77)


def test_expired_producers_of_a_snapshot_are_dropped(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition, producer_id=1, timestamp_ms=T0)
    append(partition, producer_id=2, timestamp_ms=T0, transactional=True)
    partition.close()
    again = open_partition(tmp_path, clock=ManualClock(T0 + 100), producer_id_expiration_ms=100)
    assert [producer.producer_id for producer in again.producers.view()] == [2]
    assert again.last_stable_offset == 1


@pytest.mark.slow
def test_roll_and_expiration_of_100_000_producers_run_in_short_turns(tmp_path: Path) -> None:
    """A roll, planning a compaction, and expiring all producers each take only short turns."""
    partition = open_partition(tmp_path)
    for producer_id in range(100_000):
        marker(partition, producer_id, commit=True)
    watch = LoopWatch()
    watch.time(lambda: partition.flushes.roll(T0), "roll")
    watch.time(partition.producers.last_records, "last records")
    expired = []
    while len(expired) == 0 or expired[-1]:
        watch.time(lambda: expired.append(partition.producers.expire(T0, 0)), "expiry")
    assert sum(expired) == 100_000
    watch.check()
    partition.close()
