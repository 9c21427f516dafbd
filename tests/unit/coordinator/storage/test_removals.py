"""Removal of topics and files, for which requests do not wait; also after a kill."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fencepost.coordinator.broker_services import Services as BrokerServices
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.metadata.log import MetadataLog
from fencepost.groups.commands import CommitOffsets, FetchOffsets, FetchTopic, OffsetToCommit
from fencepost.logcore.checkpoints import LOG_START_CHECKPOINT, read_offsets
from fencepost.logcore.errors import NoSpaceError, StorageError
from fencepost.logcore.fs import OsFileSystem
from fencepost.logcore.machine import EndMarker, ProducerStamp, Record
from fencepost.protocol.steps import finish
from tests.support.cluster import Cluster
from tests.support.faults import FaultyDisk
from tests.support.metadata_changes import create_topic, delete_topic
from tests.support.stalls import watched_loop
from tests.support.waits import until_async, until_true
from tests.unit.coordinator.services.coordinators import Services, storage

CALM = {"log.initial.task.delay.ms": "3600000"}


def write(broker: Broker, topic: str, index: int = 0, count: int = 1) -> None:
    partition = broker.services.logs.partition(topic, index)
    for _ in range(count):
        partition.append_records([Record(b"k", b"v")], now_ms=broker.clock.now_ms())


async def delete(broker: Broker, *topics: str) -> list[str]:
    """Delete topics by a request in a thread, and return the error codes."""

    def ask() -> list[str]:
        with Cluster(broker.bootstrap) as client:
            answer = client.call("delete_topics", 5, topic_names=list(topics), timeout=60_000)
            return [response["error_code"] for response in answer["responses"]]

    return await asyncio.to_thread(ask)


def doomed(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*-delete"))


async def until_gone(directory: Path) -> None:
    async def gone() -> bool:
        return not doomed(directory)

    await until_async(gone, "everything is removed")


def is_metadata(path: str) -> bool:
    return "__cluster_metadata" in path


def fail_syncs_of_metadata(disk: FaultyDisk, broker: Broker) -> None:
    """Let the metadata log's next flush fail, which takes it offline."""
    disk.sync_fails = is_metadata


def refuse_flushes_of_metadata(disk: FaultyDisk, broker: Broker) -> None:
    """Refuse file handles for a flush of the metadata log, which stays online."""

    def before(kind: str, path: str) -> None:
        if kind == "sync_directory" and is_metadata(path):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    disk.before = before
    metadata = broker.services.metadata
    assert isinstance(metadata, MetadataLog)
    metadata.partition.flushes.roll(broker.clock.now_ms())


def log_starts(directory: Path) -> dict[tuple[str, int], int]:
    return read_offsets(OsFileSystem(), str(directory), LOG_START_CHECKPOINT)


async def commit_offset(services: BrokerServices, topic: str, offset: int) -> None:
    finish(services.groups.open_in_steps())
    offsets = (OffsetToCommit(topic, 0, offset),)
    await services.groups.submit("g", CommitOffsets("g", -1, "", None, offsets))


async def committed_offset(services: BrokerServices, topic: str) -> int:
    """Return the offset of group ``g``, or -1 if it has none."""
    command = FetchOffsets("g", (FetchTopic(topic, (0,)),))
    result = await services.groups.submit("g", command)
    [(_, [found])] = result.topics  # type: ignore[attr-defined]
    offset: int = found.offset
    return offset


class ThreadsOfSteps(FaultyDisk):
    """A disk that records the blocking steps that run in the loop's thread."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = threading.current_thread()
        self.on_loop: list[tuple[str, str]] = []
        self.watched = False
        self.before = self.note

    def note(self, kind: str, path: str) -> None:
        waits = kind in {"remove", "remove_tree", "sync", "sync_directory"}
        if self.watched and waits and threading.current_thread() is self.loop:
            self.on_loop.append((kind, path))


async def test_topic_deletion_renames_directories_at_once_and_removes_them_later(tmp_path):
    disk = ThreadsOfSteps()
    async with Broker(tmp_path, config=CALM, fs=disk) as broker:
        create_topic(broker.services.metadata, "t", partitions=200)
        for index in range(200):
            write(broker, "t", index)
            await asyncio.sleep(0)
        partition = broker.services.logs.partition("t", 7)
        disk.watched = True
        with watched_loop() as watch:
            assert await delete(broker, "t") == ["none"]
            # The directories are renamed before the response and removed after it.
            assert not list(tmp_path.glob("t-?"))
            await until_gone(tmp_path)
        disk.watched = False
        watch.check()
        with pytest.raises(StorageError, match="is deleted"):
            partition.append_records([Record(b"k", b"v")], now_ms=1)
        assert disk.on_loop == []


@pytest.mark.slow
async def test_deletion_of_thousands_of_topics_does_not_block_the_event_loop(tmp_path):
    async with Broker(tmp_path, config=CALM) as broker:
        names = [f"t{number}" for number in range(3_000)]
        with broker.services.metadata.unforced():
            for name in names:
                create_topic(broker.services.metadata, name, partitions=1)
        with watched_loop() as watch:
            assert await delete(broker, *names) == ["none"] * len(names)
        watch.check()
        assert not broker.services.metadata.topics


@pytest.mark.slow
async def test_deletion_of_partition_with_many_producers_runs_in_slices(tmp_path):
    async with Broker(tmp_path, config=CALM) as broker:
        create_topic(broker.services.metadata, "t", partitions=1)
        partition = broker.services.logs.partition("t", 0)
        for producer in range(100_000):
            partition.append_marker(EndMarker(ProducerStamp(producer, 0), True), 1)
            if producer % 100 == 0:
                await asyncio.sleep(0)
        del partition
        with watched_loop() as watch:
            assert await delete(broker, "t") == ["none"]
        watch.check()
        assert broker.services.logs.producer_limit.count == 0


async def test_recreated_topic_does_not_see_files_or_offsets_of_the_old_one(tmp_path):
    """The new topic is created and written in the turn in which the old topic is deleted."""
    async with Broker(tmp_path, config=CALM) as broker:
        create_topic(broker.services.metadata, "t", partitions=3)
        for index in range(3):
            write(broker, "t", index, count=5)
        old = broker.services.logs.partition("t", 2)
        old.cleanup.delete_records_before(5)
        await broker.services.logs.save(LOG_START_CHECKPOINT)
        delete_topic(broker.services.metadata, "t")
        create_topic(broker.services.metadata, "t", partitions=3)
        write(broker, "t", 2)
        new = broker.services.logs.partition("t", 2)
        assert new is not old
        assert (new.log_start_offset, new.log_end_offset) == (0, 1)
        stored = read_offsets(OsFileSystem(), str(tmp_path), LOG_START_CHECKPOINT)
        assert ("t", 2) not in stored, "a kill now must not empty the new one"
        await broker.services.topics_forgotten()
        await until_gone(tmp_path)
        assert sorted(path.name for path in tmp_path.glob("t-*")) == ["t-2"]
        assert new.log_end_offset == 1


async def test_directories_stay_until_the_record_of_the_deletion_is_durable(tmp_path):
    """Before that, the topic may still exist after a power loss, and must have its data."""
    disk = FaultyDisk()
    async with Broker(tmp_path, config=CALM, fs=disk) as broker:
        services = broker.services
        create_topic(services.metadata, "t", partitions=1)
        write(broker, "t")
        disk.is_gated = is_metadata
        disk.gate.clear()
        with services.metadata.unforced():
            delete_topic(services.metadata, "t")
        assert services.logs.find_open(("t", 0)) is None, "it serves no longer"
        assert await asyncio.to_thread(disk.held.wait, 30), "the record is on its way to the disk"
        assert (tmp_path / "t-0").exists()
        disk.gate.set()
        await services.topics_forgotten()
        assert not (tmp_path / "t-0").exists()


async def test_directory_of_later_deletion_stays_until_its_own_record_is_durable(tmp_path):
    """The second topic is deleted while the record of the first deletion is being flushed."""
    disk = FaultyDisk()
    async with Broker(tmp_path, config=CALM, fs=disk) as broker:
        metadata = broker.services.metadata
        for name in ("first", "second"):
            create_topic(metadata, name, partitions=1)
            write(broker, name)
        disk.is_gated = is_metadata
        disk.gate.clear()
        with metadata.unforced():
            delete_topic(metadata, "first")
            assert await asyncio.to_thread(disk.held.wait, 30), "the first record is on its way"
            end = metadata.partition.log_end_offset
            delete_topic(metadata, "second")
        disk.is_gated = lambda path: is_metadata(path) and metadata.partition.recovery_point >= end
        disk.gate.set()  # only for the waiting flush
        disk.gate.clear()
        await until_true(lambda: not (tmp_path / "first-0").exists(), "the first one is renamed")
        assert metadata.partition.recovery_point == end
        assert (tmp_path / "second-0").exists()
        disk.gate.set()
        await broker.services.topics_forgotten()
        assert not (tmp_path / "second-0").exists()


async def test_directory_is_renamed_for_recreated_topic_after_record_is_durable(tmp_path):
    disk = FaultyDisk()
    async with Broker(tmp_path, config=CALM, fs=disk) as broker:
        services, metadata = broker.services, broker.services.metadata
        create_topic(metadata, "t", partitions=1)
        write(broker, "t")
        disk.is_gated = is_metadata
        disk.gate.clear()
        with metadata.unforced():
            delete_topic(metadata, "t")
            end = metadata.partition.log_end_offset
            create_topic(metadata, "t", partitions=1)
        assert metadata.partition.recovery_point < end
        assert services.replicas.leader("t", 0).log_end_offset == 0
        assert metadata.partition.recovery_point >= end
        disk.gate.set()
        await services.topics_forgotten()


@pytest.mark.parametrize("spoil", [fail_syncs_of_metadata, refuse_flushes_of_metadata])
async def test_directory_stays_if_its_deletion_record_cannot_be_flushed(tmp_path, spoil):
    """A new topic of the same name cannot be opened, and a shutdown renames no directory."""
    disk = FaultyDisk()
    async with Broker(tmp_path, config=CALM, fs=disk) as broker:
        metadata = broker.services.metadata
        create_topic(metadata, "t", partitions=1)
        write(broker, "t")
        spoil(disk, broker)
        with metadata.unforced():
            delete_topic(metadata, "t")
            create_topic(metadata, "t", partitions=1)
        with pytest.raises(StorageError, match=r"t-0 cannot be made: .* not on disk"):
            broker.services.replicas.leader("t", 0)
        assert (tmp_path / "t-0" / f"{0:020}.log").stat().st_size > 0
    assert (tmp_path / "t-0").exists()
    assert not (tmp_path / ".kafka_cleanshutdown").exists()


async def test_directory_with_unflushed_deletion_record_goes_with_next_deletion(tmp_path):
    disk = FaultyDisk()
    async with Broker(tmp_path, config=CALM, fs=disk) as broker:
        services, metadata = broker.services, broker.services.metadata
        for name in ("first", "second"):
            create_topic(metadata, name, partitions=1)
            write(broker, name)
        refuse_flushes_of_metadata(disk, broker)
        with metadata.unforced():
            delete_topic(metadata, "first")
        with pytest.raises(NoSpaceError):
            await services.replicas.deletions_done()
        assert (tmp_path / "first-0").exists()
        disk.before = lambda _kind, _path: None
        delete_topic(metadata, "second")
        await services.topics_forgotten()
        assert not list(tmp_path.glob("first-?")) + list(tmp_path.glob("second-?"))


async def test_log_start_of_deleted_topic_is_kept_until_its_record_is_durable(tmp_path):
    """If it were not kept, the topic would have deleted records again after a power loss."""
    disk = FaultyDisk()
    async with Broker(tmp_path, config=CALM, fs=disk) as broker:
        services, metadata = broker.services, broker.services.metadata
        create_topic(metadata, "t", partitions=1)
        create_topic(metadata, "other", partitions=1)
        write(broker, "t", count=5)
        services.logs.partition("t", 0).cleanup.delete_records_before(3)
        disk.is_gated = is_metadata
        disk.gate.clear()
        with metadata.unforced():
            delete_topic(metadata, "t")
        assert await asyncio.to_thread(disk.held.wait, 30)
        write(broker, "other")
        assert log_starts(tmp_path) == {("t", 0): 3}
        with metadata.unforced():
            create_topic(metadata, "t", partitions=1)
        disk.gate.set()
        write(broker, "t")
        assert log_starts(tmp_path) == {}, "it is not taken for the start of the new one"
        await services.topics_forgotten()


async def test_offsets_of_deleted_topic_are_removed_before_checkpoints_are_written(tmp_path):
    """Removing the offsets waits only for the deletion record to be durable."""
    disk, may_write = FaultyDisk(), threading.Event()

    def before(_kind: str, path: str) -> None:
        if "checkpoint" in path and threading.current_thread() is not threading.main_thread():
            assert may_write.wait(30)

    services = await Services(tmp_path, fs=disk).start()
    services.topic("t")
    await commit_offset(services, "t", 5)
    services.replicas.leader("t", 0)
    disk.before = before
    delete_topic(services.metadata, "t")
    async with asyncio.timeout(20):
        await services.groups.forgotten()
    assert await committed_offset(services, "t") == -1
    assert not may_write.is_set()
    may_write.set()
    await services.stop()


async def test_offsets_of_deleted_topic_are_removed_before_shards_close(tmp_path):
    """The broker stops while the deletion record is being flushed."""
    disk = FaultyDisk()
    services = await Services(tmp_path, fs=disk).start()
    services.topic("t")
    await commit_offset(services, "t", 5)
    disk.is_gated = is_metadata
    disk.gate.clear()
    with services.metadata.unforced():
        delete_topic(services.metadata, "t")
    stopping = asyncio.ensure_future(services.groups.stop())
    assert await asyncio.to_thread(disk.held.wait, 30)
    assert not stopping.done()
    disk.gate.set()
    await stopping
    await services.stop()
    again = await Services(tmp_path).start()
    assert await committed_offset(again, "t") == -1
    await again.stop()


async def test_offsets_with_unflushed_deletion_record_go_with_next_deletion(tmp_path):
    disk = FaultyDisk()
    async with Broker(tmp_path, config=CALM, fs=disk) as broker:
        services = broker.services
        names = "first", "second"
        for name in names:
            create_topic(services.metadata, name, partitions=1)
            await commit_offset(services, name, 5)
        refuse_flushes_of_metadata(disk, broker)
        with services.metadata.unforced():
            delete_topic(services.metadata, "first")
        with pytest.raises(NoSpaceError):
            await services.groups.forgotten()
        assert [await committed_offset(services, name) for name in names] == [5, 5]
        disk.before = lambda _kind, _path: None
        delete_topic(services.metadata, "second")
        await services.groups.forgotten()
        assert [await committed_offset(services, name) for name in names] == [-1, -1]


async def test_files_left_by_a_kill_are_removed_after_startup(tmp_path):
    """Renamed directories, directories of a deleted topic, and files of removed segments."""
    async with Broker(tmp_path, config=CALM) as broker:
        for name in ("deleted", "kept"):
            create_topic(broker.services.metadata, name, partitions=1)
            write(broker, name)
    killed = storage(tmp_path)
    delete_topic(killed.metadata, "deleted")
    killed.logs.close()  # after the record, before the directory's removal
    assert (tmp_path / "deleted-0").exists()
    (tmp_path / "old-0.0123-delete").mkdir()
    (tmp_path / "old-0.0123-delete" / "file").write_text("x")
    (tmp_path / "kept-0" / f"{0:020}.log.deleted").write_bytes(b"x")
    disk, may_remove = FaultyDisk(), threading.Event()

    def before(kind: str, path: str) -> None:
        if kind in {"remove_tree", "remove"} and ("-delete" in path or ".deleted" in path):
            assert threading.current_thread() is not threading.main_thread()
            assert may_remove.wait(60)

    disk.before = before
    async with Broker(tmp_path, config=CALM, fs=disk) as broker:
        assert broker.address[1] > 0, "it listens"
        assert len(doomed(tmp_path)) == 2
        assert not (tmp_path / "deleted-0").exists()
        assert broker.services.logs.partition("kept", 0).log_end_offset == 1
        may_remove.set()
        await until_gone(tmp_path)
        await broker.services.logs.removals.finish()
    assert not list((tmp_path / "kept-0").glob("*.deleted"))


async def test_shutdown_waits_for_the_current_removal_only(tmp_path):
    disk, began, may_end = FaultyDisk(), threading.Event(), threading.Event()

    def before(kind: str, _path: str) -> None:
        if kind == "remove_tree":
            began.set()
            assert may_end.wait(60)

    async with Broker(tmp_path, config=CALM, fs=disk) as broker:
        create_topic(broker.services.metadata, "t", partitions=5)
        for index in range(5):
            write(broker, "t", index)
        disk.before = before
        assert await delete(broker, "t") == ["none"]
        await asyncio.to_thread(began.wait, 60)
        stopping = asyncio.ensure_future(broker.services.logs.removals.close())
        await asyncio.sleep(0)
        assert not stopping.done()
        may_end.set()
        await stopping
        assert len(doomed(tmp_path)) == 4
    async with Broker(tmp_path, config=CALM):
        await until_gone(tmp_path)
    assert (tmp_path / ".kafka_cleanshutdown").exists()


async def test_failed_removal_does_not_stop_other_removals(tmp_path):
    disk = FaultyDisk()

    def before(kind: str, path: str) -> None:
        if kind == "remove_tree" and "/bad-0." in path:
            raise OSError(errno.EIO, "Input/output error")
        if kind == "rename" and path.endswith("/stuck-0"):
            raise OSError(errno.EIO, "Input/output error")

    with capture_logs() as told:
        async with Broker(tmp_path, config=CALM, fs=disk) as broker:
            for name in ("bad", "stuck", "good"):
                create_topic(broker.services.metadata, name, partitions=1)
                write(broker, name)
            disk.before = before
            assert await delete(broker, "bad", "stuck", "good") == ["none"] * 3
            await broker.services.logs.removals.finish()
            assert [name.split(".")[0] for name in doomed(tmp_path)] == ["bad-0"]
            assert (tmp_path / "stuck-0").exists()
            disk.before = lambda _kind, _path: None
    assert [logged["event"] for logged in told if logged["log_level"] == "warning"] == [
        "directory not removed",
        "not removed",
    ]
    async with Broker(tmp_path, config=CALM) as broker:
        await broker.services.logs.removals.finish()
    assert not doomed(tmp_path)
    assert not list(tmp_path.glob("stuck-*"))


async def test_directory_is_not_removed_before_its_rename_is_durable(tmp_path):
    disk = FaultyDisk()

    def before(kind: str, path: str) -> None:
        if kind == "sync_directory" and path == str(tmp_path):
            raise OSError(errno.EIO, "Input/output error")

    async with Broker(tmp_path, config=CALM, fs=disk) as broker:
        create_topic(broker.services.metadata, "t", partitions=1)
        write(broker, "t")
        disk.before = before
        assert await delete(broker, "t") == ["none"]
        await broker.services.logs.removals.finish()
        (left,) = tmp_path.glob("t-0.*-delete")
        assert (left / "partition.metadata").exists()
        disk.before = lambda _kind, _path: None


@pytest.mark.parametrize("delay_ms", [0, 1])
async def test_segments_deleted_by_retention_are_removed_off_the_event_loop(tmp_path, delay_ms):
    disk = ThreadsOfSteps()
    async with Broker(tmp_path, config=CALM, fs=disk) as broker:
        configs = {"retention.ms": "1", "file.delete.delay.ms": str(delay_ms)}
        create_topic(broker.services.metadata, "t", partitions=1, configs=configs)
        partition, now_ms = broker.services.logs.partition("t", 0), broker.clock.now_ms()
        for _ in range(3):
            partition.append_records([Record(b"k", b"v" * 1_000)], now_ms=1)
            partition.flushes.roll(now_ms)
        assert broker._maintenance is not None
        disk.watched = True
        await broker._maintenance.run_retention(partition)
        assert partition.log_start_offset == 3

        async def gone() -> bool:
            assert broker._maintenance is not None
            await broker._maintenance.run_retention(partition)
            await broker.services.logs.removals.finish()
            return not list((tmp_path / "t-0").glob("*.deleted"))

        await until_async(gone, "the delay has passed")
        disk.watched = False
        assert disk.on_loop == []
        assert [path.name for path in (tmp_path / "t-0").glob("*.log")] == [f"{3:020}.log"]
