from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fencepost.cluster.records import PartitionChangeRecord
from fencepost.coordinator.errors import UnknownTopicOrPartitionError
from fencepost.coordinator.runtime.delayed_fetch import (
    DelayedFetch,
    DelayedFetches,
    WatchedPartition,
)
from fencepost.coordinator.runtime.turns import Work, completed
from fencepost.coordinator.storage.maintenance import Maintenance
from fencepost.logcore.checkpoints import (
    CLEANER_CHECKPOINT,
    HIGH_WATERMARK_CHECKPOINT,
    RECOVERY_POINT_CHECKPOINT,
    read_offsets,
)
from fencepost.logcore.errors import LogError, StorageError
from fencepost.logcore.fs import OsFileSystem
from fencepost.logcore.machine import EndMarker, ProducerStamp, Record
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from tests.support.clock import ManualClock
from tests.support.faults import CHANGES, FaultyDisk, Killed, MortalDisk
from tests.support.metadata_changes import (
    create_topic,
    delete_topic,
    set_broker_configs,
    set_topic_configs,
)
from tests.support.waits import until_true
from tests.unit.coordinator.services.coordinators import storage

pytestmark = pytest.mark.usefixtures("killed_logs_are_closed")

CHECKPOINTS = {
    "recovery-point-offset-checkpoint",
    "log-start-offset-checkpoint",
    "replication-offset-checkpoint",
}


class Node:
    """The storage of a broker; another object for the same directory is the restarted broker."""

    def __init__(self, directory: Path, config=None, *, fs=None, clock=None) -> None:
        store = storage(directory, config, fs=fs, clock=clock)
        self.clock, self.config, self.logs = store.clock, store.config, store.logs
        self.metadata, self.flusher = store.metadata, store.flusher
        self.replicas = store.replicas

    def delete(self, topic: str) -> None:
        """Delete a topic, and wait until its directories are removed."""
        asyncio.run(self._delete(topic))

    async def _delete(self, topic: str) -> None:
        self.replicas.start()
        delete_topic(self.metadata, topic)
        await self.replicas.deletions_done()
        await self.clean_up()

    async def clean_up(self) -> None:
        await self.logs.removals.finish()
        await self.logs.removals.close()

    def write(self, topic: str, index: int = 0, count: int = 1) -> Partition:
        partition = self.logs.partition(topic, index)
        for number in range(count):
            record = Record(b"k", str(number).encode())
            partition.append_records([record], now_ms=self.clock.now_ms())
        return partition


def directories(path: Path) -> set[str]:
    return {child.name for child in path.iterdir() if child.is_dir()}


def offsets(path: Path, name: str) -> dict[tuple[str, int], int]:
    return read_offsets(OsFileSystem(), str(path), name)


def test_partition_directory_is_created_on_first_use(tmp_path):
    node = Node(tmp_path)
    create_topic(node.metadata, "a", partitions=3)
    assert directories(tmp_path) == {"__cluster_metadata-0"}
    node.write("a", 1)
    assert directories(tmp_path) == {"__cluster_metadata-0", "a-1"}
    assert node.logs.partition("a", 1) is node.logs.partition("a", 1)


@pytest.mark.parametrize(("topic", "index"), [("b", 0), ("a", 3), ("a", -1)])
def test_missing_topic_or_partition_is_unknown(tmp_path, topic, index):
    node = Node(tmp_path)
    create_topic(node.metadata, "a", partitions=3)
    assert node.logs.find(topic, index) is None
    with pytest.raises(UnknownTopicOrPartitionError):
        node.logs.partition(topic, index)


@pytest.mark.parametrize("clean", [True, False])
def test_records_survive_clean_and_unclean_restart(tmp_path, clean):
    node = Node(tmp_path)
    create_topic(node.metadata, "a", partitions=2)
    node.write("a", 1, count=5)
    if clean:
        node.logs.close()
        assert (tmp_path / ".kafka_cleanshutdown").exists()
    node = Node(tmp_path)
    assert node.logs.was_clean is clean
    assert not (tmp_path / ".kafka_cleanshutdown").exists()
    partition = node.logs.partition("a", 1)
    assert (partition.log_end_offset, partition.high_watermark) == (5, 5)
    assert (partition.recovery is None) is clean
    assert partition.marks.leader_epoch == 1


@pytest.mark.parametrize(("silent_ms", "known"), [(172_799_999, [7]), (172_800_000, [])])
def test_startup_drops_producers_idle_for_producer_id_expiration(tmp_path, silent_ms, known):
    """The test sets the expiration to two days; the default is one day."""
    config = {"producer.id.expiration.ms": "172800000"}
    node = Node(tmp_path, config)
    create_topic(node.metadata, "a", partitions=1)
    partition = node.logs.partition("a", 0)
    partition.append_marker(EndMarker(ProducerStamp(7, 0), True), node.clock.now_ms())
    node.logs.close()
    again = Node(tmp_path, config, clock=ManualClock(node.clock.now_ms() + silent_ms))
    found = list(again.logs.partition("a", 0).producers.view())
    assert [producer.producer_id for producer in found] == known


def test_max_producer_ids_applies_to_the_whole_broker(tmp_path):
    """The limit covers all partitions and may change while the broker runs."""
    node = Node(tmp_path, {"max.producer.ids": "2"})
    create_topic(node.metadata, "a", partitions=3)
    create_topic(node.metadata, "b", partitions=1)

    def write(topic, index, producer_id):
        partition = node.logs.partition(topic, index)
        stamp = ProducerStamp(producer_id, 0)
        partition.append_marker(EndMarker(stamp, True), 1)
        return {
            (log.topic, log.index, state.producer_id)
            for log in node.logs
            for state in log.producers.view()
        }

    write("a", 0, 1)
    assert write("a", 1, 1) == {("a", 0, 1), ("a", 1, 1)}
    assert write("b", 0, 2) == {("a", 1, 1), ("b", 0, 2)}
    assert node.logs.producer_limit.forgotten == 1
    node.delete("b")
    assert write("a", 2, 5) == {("a", 1, 1), ("a", 2, 5)}
    assert node.logs.producer_limit.forgotten == 1
    set_broker_configs(node.metadata, "", {"max.producer.ids": "3"})
    assert write("a", 2, 6) == {("a", 1, 1), ("a", 2, 5), ("a", 2, 6)}
    node.logs.close()
    assert Node(tmp_path).logs.producer_limit.maximum == 3


def test_clean_shutdown_writes_all_checkpoints(tmp_path):
    node = Node(tmp_path)
    create_topic(node.metadata, "a", partitions=2)
    node.write("a", 0, count=4).cleanup.delete_records_before(3)
    node.write("a", 1, count=2)
    node.logs.close()
    ends = {("a", 0): 4, ("a", 1): 2}
    for name in ("recovery-point-offset-checkpoint", "replication-offset-checkpoint"):
        found = offsets(tmp_path, name)
        assert found.pop(("__cluster_metadata", 0)) > 0
        assert found == ends
    assert offsets(tmp_path, "log-start-offset-checkpoint") == {("a", 0): 3}
    assert Node(tmp_path).logs.partition("a", 0).log_start_offset == 3


@pytest.mark.parametrize("name", sorted(CHECKPOINTS))
@pytest.mark.parametrize("damage", [b"", b"0\n7\na 0 1\n", b"\xff\xfe", b"0\n1\na 0 x\n"])
def test_corrupt_checkpoint_loses_no_record(tmp_path, name, damage):
    node = Node(tmp_path)
    create_topic(node.metadata, "a")
    node.write("a", count=4)
    node.logs.close()
    (tmp_path / name).write_bytes(damage)
    assert Node(tmp_path).logs.partition("a", 0).log_end_offset == 4


def test_checkpoint_is_written_only_if_offsets_changed(tmp_path):
    node = Node(tmp_path)
    create_topic(node.metadata, "a")
    node.write("a")
    node.logs.checkpoint(HIGH_WATERMARK_CHECKPOINT)
    path = tmp_path / "replication-offset-checkpoint"
    before = path.stat().st_ino
    node.logs.checkpoint(HIGH_WATERMARK_CHECKPOINT)
    assert path.stat().st_ino == before
    node.write("a")
    node.logs.checkpoint(HIGH_WATERMARK_CHECKPOINT)
    assert offsets(tmp_path, path.name)["a", 0] == 2


def test_old_high_watermark_checkpoint_hides_no_record_after_a_kill(tmp_path):
    node = Node(tmp_path)
    create_topic(node.metadata, "a")
    node.write("a", count=3)
    node.logs.checkpoint()
    node.write("a", count=4)
    assert Node(tmp_path).logs.partition("a", 0).high_watermark == 7


def test_deleted_topic_leaves_no_records_or_offsets_for_its_successor(tmp_path):
    node = Node(tmp_path)
    create_topic(node.metadata, "a", partitions=2)
    node.write("a", 1, count=9).cleanup.delete_records_before(9)
    node.logs.checkpoint()
    node.delete("a")
    assert directories(tmp_path) == {"__cluster_metadata-0"}
    create_topic(node.metadata, "a", partitions=2)
    assert node.write("a", 1, count=2).log_end_offset == 2
    for name in CHECKPOINTS:
        assert ("a", 1) not in offsets(tmp_path, name)
    partition = Node(tmp_path).logs.partition("a", 1)
    assert (partition.log_start_offset, partition.log_end_offset) == (0, 2)


def test_checkpointed_offsets_of_deleted_partition_are_dropped_at_startup(tmp_path):
    node = Node(tmp_path)
    create_topic(node.metadata, "a")
    node.write("a", count=9).cleanup.delete_records_before(9)
    node.logs.checkpoint()
    # The same state as after a kill between the deletion record and the removal of the directory
    # and the offsets.
    delete_topic(node.metadata, "a")
    node = Node(tmp_path)
    asyncio.run(node.clean_up())
    assert directories(tmp_path) == {"__cluster_metadata-0"}
    create_topic(node.metadata, "a")
    node.write("a", count=2)
    assert ("a", 0) not in offsets(tmp_path, "log-start-offset-checkpoint")
    partition = Node(tmp_path).logs.partition("a", 0)
    assert (partition.log_start_offset, partition.log_end_offset) == (0, 2)


def test_directories_without_a_topic_are_renamed_to_stray(tmp_path):
    node = Node(tmp_path)
    create_topic(node.metadata, "a", partitions=1)
    node.write("a")
    node.logs.close()
    (tmp_path / "a-0").rename(tmp_path / "stranger-0")
    long = "x" * 249
    (tmp_path / f"{long}-10").mkdir()
    (tmp_path / "a-7").mkdir()
    (tmp_path / "gone-0.0123-delete").mkdir()
    (tmp_path / "not a partition").mkdir()
    node = Node(tmp_path)
    asyncio.run(node.clean_up())
    found = directories(tmp_path) - {"__cluster_metadata-0", "not a partition"}
    assert len(found) == 3
    assert all(name.endswith("-stray") and len(name) <= 255 for name in found)
    assert node.write("a").log_end_offset == 1
    assert directories(tmp_path) >= found | {"a-0"}
    Node(tmp_path)
    assert directories(tmp_path) >= found


async def test_changed_configs_apply_to_open_partitions(tmp_path):
    node = Node(tmp_path)
    create_topic(node.metadata, "a")
    create_topic(node.metadata, "b", configs={"retention.ms": "5"})
    a, b = node.write("a"), node.write("b")
    set_broker_configs(node.metadata, "", {"log.retention.ms": "7"})
    # On a busy machine the first topic may take the whole turn, and the other topics follow later.
    await until_true(lambda: a.log.config.retention_ms == 7, "the broker's setting applies")
    assert b.log.config.retention_ms == 5
    set_topic_configs(node.metadata, "a", {"retention.ms": "8"})
    set_topic_configs(node.metadata, "b", {})
    assert (a.log.config.retention_ms, b.log.config.retention_ms) == (8, 7)


@pytest.mark.parametrize("killed_at", range(40))
def test_topic_creation_and_deletion_are_atomic_under_a_kill(tmp_path, killed_at):
    """Acknowledged changes survive; an unacknowledged change is complete or has no effect."""
    fs = MortalDisk(kinds=CHANGES - {"create"})
    node = Node(tmp_path, fs=fs)
    create_topic(node.metadata, "kept", partitions=2)
    node.write("kept", 1, count=3)
    done = []
    fs.dies_after(killed_at)
    try:
        create_topic(node.metadata, "made", partitions=2)
        done.append("create")
        node.write("made", 1)
        done.append("write")
        node.delete("made")
        done.append("delete")
    except Killed:
        pass
    node = Node(tmp_path)
    assert node.logs.partition("kept", 1).log_end_offset == 3
    made = node.metadata.topic("made")
    if "delete" in done:
        assert made is None
    elif "create" in done and made is not None:
        end = node.logs.partition("made", 1).log_end_offset
        assert end == 1 if "write" in done else end in {0, 1}
    if made is None:
        asyncio.run(node.clean_up())
        assert not any(name.startswith("made") for name in directories(tmp_path))
        create_topic(node.metadata, "made")
    assert node.write("made").log_end_offset == 1


def test_failed_startup_leaves_no_clean_shutdown_file(tmp_path):
    node = Node(tmp_path)
    create_topic(node.metadata, "a")
    node.write("a", count=3).cleanup.delete_records_before(2)
    node.logs.close()

    full = FaultyDisk()
    full.fails = {"write": errno.ENOSPC}
    with pytest.raises(LogError):  # the metadata log cannot write
        Node(tmp_path, fs=full)
    assert not (tmp_path / ".kafka_cleanshutdown").exists()
    assert Node(tmp_path).logs.partition("a", 0).log_start_offset == 2


def test_offline_partition_prevents_the_clean_shutdown_file(tmp_path):
    fs = FaultyDisk()
    node = Node(tmp_path, fs=fs)
    create_topic(node.metadata, "a")
    node.write("a")
    fs.fails = {"write": errno.EIO}
    with pytest.raises(StorageError):
        node.write("a")
    fs.fails = {}
    assert node.logs.is_offline("a", 0)
    node.logs.close()
    assert not (tmp_path / ".kafka_cleanshutdown").exists()


# --- maintenance ---------------------------------------------------------------------------------


async def test_retention_and_flush_follow_the_clock(tmp_path):
    node = Node(tmp_path)
    create_topic(node.metadata, "a", configs={"retention.ms": "1000", "flush.ms": "500"})
    partition = node.write("a", count=3)
    work = Maintenance(node.logs, node.config, node.clock)
    work.run_flush(partition)
    assert partition.recovery_point == 0
    node.clock.advance(501)
    work.run_flush(partition)
    await node.flusher.close()
    assert partition.recovery_point == 3
    await work.run_retention(partition)
    assert partition.log_start_offset == 0
    node.clock.advance(1000)
    await work.run_retention(partition)
    assert partition.log_start_offset == 3
    work.run_producer_expiry(partition)


async def test_maintenance_tasks_run_periodically_until_stopped(tmp_path):
    node = Node(
        tmp_path,
        {
            "log.initial.task.delay.ms": "0",
            "log.retention.check.interval.ms": "10",
            "replica.high.watermark.checkpoint.interval.ms": "10",
        },
    )
    create_topic(node.metadata, "a", configs={"retention.ms": "1000"})
    partition = node.write("a", count=3)
    node.clock.advance(2000)
    work = Maintenance(node.logs, node.config, node.clock)
    work.start()
    checkpoint = tmp_path / "replication-offset-checkpoint"
    await until_true(lambda: partition.log_start_offset == 3 and checkpoint.exists())
    await work.stop()
    assert not work.tasks


# --- long polls ----------------------------------------------------------------------------------


class Reader:
    def __init__(
        self,
        node: Node,
        polls: DelayedFetches,
        min_bytes: int,
        max_wait_ms: int = 60_000,
        offset: int | None = None,
    ) -> None:
        self.partition = node.logs.partition("a", 0)
        self.poll = DelayedFetch(
            polls,
            Isolation.READ_UNCOMMITTED,
            min_bytes=min_bytes,
            max_wait_ms=max_wait_ms,
        )
        start = self.partition.log_end_offset if offset is None else offset
        self.poll.watch(WatchedPartition(self.partition, start, 1 << 20))

    async def end_offset(self) -> int:
        """Return the log end offset after the wait."""
        await asyncio.wait_for(completed(self._wait()), 30)
        return self.partition.log_end_offset

    def _wait(self) -> Work[None]:
        if not self.poll.is_over:
            yield self.poll


async def test_delayed_fetch_completes_when_min_bytes_are_appended(tmp_path):
    node, polls = Node(tmp_path), DelayedFetches()
    create_topic(node.metadata, "a")
    reader = Reader(node, polls, min_bytes=200)
    node.write("a")
    await asyncio.sleep(0)
    assert not reader.poll.is_over
    assert len(polls) == 1
    node.write("a", count=5)
    assert await reader.end_offset() == 6
    await asyncio.sleep(0)
    assert len(polls) == 0
    assert not reader.partition.marks._listeners


async def test_delayed_fetch_completes_at_once_if_min_bytes_are_available(tmp_path):
    node, polls = Node(tmp_path), DelayedFetches()
    create_topic(node.metadata, "a")
    node.write("a", count=5)
    size = node.logs.partition("a", 0).log.size_bytes
    assert await Reader(node, polls, size, offset=0).end_offset() == 5
    waiting = Reader(node, polls, size + 1, offset=0)
    await asyncio.sleep(0.01)
    assert not waiting.poll.is_over
    waiting.poll.cancel()


async def test_delayed_fetch_ends_on_timeout_cancellation_or_close(tmp_path):
    node, polls = Node(tmp_path), DelayedFetches()
    create_topic(node.metadata, "a")
    assert await Reader(node, polls, 1, max_wait_ms=5).end_offset() == 0
    left = Reader(node, polls, 1)
    left.poll.cancel()
    assert left.poll.is_over
    assert len(polls) == 0
    last = Reader(node, polls, 1)
    polls.close()
    assert await last.end_offset() == 0
    late = Reader(node, polls, 1)
    assert await late.end_offset() == 0
    await asyncio.sleep(0)
    assert len(polls) == 0
    assert not last.partition.marks._listeners


async def test_deadlines_of_ended_fetches_are_removed_before_they_pass(tmp_path):
    node, polls = Node(tmp_path), DelayedFetches()
    create_topic(node.metadata, "a")
    for _ in range(1_000):
        Reader(node, polls, 1).poll.cancel()
    order: list[int] = []

    async def expires(max_wait_ms: int) -> None:
        await Reader(node, polls, 1, max_wait_ms=max_wait_ms).end_offset()
        order.append(max_wait_ms)

    waiting = [asyncio.ensure_future(expires(max_wait_ms)) for max_wait_ms in (300, 100, 200)]
    await asyncio.sleep(0)
    assert len(polls._deadlines) < 100
    await asyncio.gather(*waiting)
    assert order == [100, 200, 300]
    await until_true(lambda: polls._timer is None, "no deadline is left")


async def test_delayed_fetch_completes_when_its_offset_is_deleted(tmp_path):
    node, polls = Node(tmp_path), DelayedFetches()
    create_topic(node.metadata, "a")
    reader = Reader(node, polls, 1_000_000)
    node.write("a", count=3)
    await asyncio.sleep(0)
    assert not reader.poll.is_over
    reader.partition.cleanup.delete_records_before(2)
    assert await reader.end_offset() == 3


# --- reports of repairs at startup ----------------------------------------------------------------


def told_of(told, event):
    return [
        {key: value for key, value in line.items() if key != "event"}
        for line in told
        if line["event"] == event
    ]


def damage(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


def test_recovery_that_truncates_acknowledged_records_logs_an_error(tmp_path):
    node = Node(tmp_path)
    create_topic(node.metadata, "a", partitions=2)
    node.write("a", 0, 10)
    node.write("a", 1, 1)
    node.logs.checkpoint(HIGH_WATERMARK_CHECKPOINT)
    path = tmp_path / "a-0" / f"{0:020d}.log"
    size = path.stat().st_size
    damage(path, size // 2 + 50)
    with capture_logs() as told:
        again = Node(tmp_path)
    end = again.logs.partition("a", 0).log_end_offset
    assert end == 5
    (line,) = told_of(told, "log cut")
    assert "CRC" in line.pop("cause")
    assert line == {
        "partition": "a-0",
        "log_end_offset": 5,
        "records": 5,
        "bytes": size - path.stat().st_size,
        "acknowledged_offsets_lost": 5,
        "kept": [str(tmp_path / "a-0" / f"{5:020d}.log.1-stray")],
        "log_level": "error",
    }
    # After another restart the loss is no longer known, so nothing is reported.
    again.logs.checkpoint(HIGH_WATERMARK_CHECKPOINT)
    with capture_logs() as told:
        Node(tmp_path)
    assert not [line for line in told if line["log_level"] in {"warning", "error"}]


def test_recovery_of_a_torn_write_logs_a_warning(tmp_path):
    node = Node(tmp_path)
    create_topic(node.metadata, "a", partitions=1)
    node.write("a", 0, 3)
    node.logs.checkpoint(HIGH_WATERMARK_CHECKPOINT)
    path = tmp_path / "a-0" / f"{0:020d}.log"
    path.write_bytes(path.read_bytes() + path.read_bytes()[:70])
    with capture_logs() as told:
        Node(tmp_path)
    (line,) = told_of(told, "log cut")
    assert (line["log_level"], line["bytes"], line["acknowledged_offsets_lost"]) == (
        "warning",
        70,
        0,
    )


def test_log_shorter_than_its_recovery_point_logs_an_error(tmp_path):
    """The log is truncated between batches, or has no files: recovery finds no bad batch."""
    node = Node(tmp_path)
    create_topic(node.metadata, "a", partitions=2)
    for index in (0, 1):
        node.write("a", index, 4).flushes.run(node.clock.now_ms())
    node.logs.checkpoint(RECOVERY_POINT_CHECKPOINT)
    path = tmp_path / "a-0" / f"{0:020d}.log"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    for file in (tmp_path / "a-1").glob("*.log"):
        file.unlink()
    with capture_logs() as told:
        Node(tmp_path)
    lines = told_of(told, "log shorter than it was")
    assert {line["log_level"] for line in lines} == {"error"}
    assert {line["partition"]: line["acknowledged_offsets_lost"] for line in lines} == {
        "a-0": 2,
        "a-1": 4,
    }


def test_corruption_below_recovery_point_is_logged_and_kept(tmp_path):
    node = Node(tmp_path)
    create_topic(node.metadata, "a", partitions=1)
    node.write("a", 0, 4).flushes.run(node.clock.now_ms())
    node.logs.checkpoint(RECOVERY_POINT_CHECKPOINT)
    path = tmp_path / "a-0" / f"{0:020d}.log"
    damage(path, 50)
    rotten = path.read_bytes()
    with capture_logs() as told:
        again = Node(tmp_path)
    (line,) = told_of(told, "damage left in the log")
    assert (line["log_level"], line["offset"], line["next_offset"]) == ("error", 0, 1)
    assert not told_of(told, "log cut")
    assert again.logs.partition("a", 0).log_end_offset == 4
    assert path.read_bytes() == rotten


def test_offset_gap_below_cleaned_offset_is_not_truncated(tmp_path):
    """Older versions may have compacted the log's last segment."""
    node = Node(tmp_path)
    create_topic(node.metadata, "a", partitions=1)
    node.write("a", 0, 6)
    node.logs.cleaned["a", 0] = 5
    node.logs.checkpoint(CLEANER_CHECKPOINT)
    path = tmp_path / "a-0" / f"{0:020d}.log"
    raw, size = path.read_bytes(), path.stat().st_size // 6
    path.write_bytes(raw[:size] + raw[3 * size :])
    assert Node(tmp_path).logs.partition("a", 0).log_end_offset == 6


# --- logs with other replicas ---------------------------------------------------------------------


def test_replicated_log_starts_with_its_checkpointed_high_watermark(tmp_path):
    """With other replicas the log has its checkpointed high watermark, not the log end offset."""
    node = Node(tmp_path)
    topic = create_topic(node.metadata, "t", 3, {})
    for index in range(3):
        node.write("t", index, count=4)
    both = {"isr": (1, 2), "replicas": (1, 2)}
    node.metadata.append([PartitionChangeRecord(topic.topic_id, at, **both) for at in (0, 1)])
    node.logs.partition("t", 0).marks.replicate(3)
    node.logs.partition("t", 1).marks.replicate(4)
    node.logs.close()
    again = Node(tmp_path)
    marks = [again.logs.partition("t", at).marks for at in range(3)]
    assert [(mark.high_watermark, mark.is_replicated) for mark in marks] == [
        (3, True),
        (4, True),
        (4, False),
    ]
    again.logs.close()
    (tmp_path / "replication-offset-checkpoint").unlink()
    lost = Node(tmp_path)
    assert [lost.logs.partition("t", at).high_watermark for at in range(3)] == [0, 0, 4]
    lost.logs.close()
