"""Background work on a failing disk: the next round and the shutdown succeed."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.storage.cleaner import Cleaner
from fencepost.coordinator.storage.maintenance import Maintenance
from fencepost.logcore.batch import decode_records
from fencepost.logcore.checkpoints import CLEANER_CHECKPOINT, read_offsets
from fencepost.logcore.errors import StorageError
from fencepost.logcore.fs import OsFileSystem
from fencepost.logcore.machine import Record
from fencepost.logcore.partition import Partition
from tests.support.clock import ManualClock
from tests.support.faults import FaultyDisk
from tests.support.metadata_changes import create_topic, delete_topic
from tests.support.waits import until_true
from tests.unit.coordinator.services.coordinators import Services

COMPACTED = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0",
    "file.delete.delay.ms": "0",
}
CALM = {"log.initial.task.delay.ms": "3600000", "log.cleaner.backoff.ms": "10"}
CLEAN_MARK = ".kafka_cleanshutdown"

Faults = Callable[[str, str], None]


def fault(kind: str, part: str, error: Exception | None = None) -> Faults:
    """Raise ``error``, or MemoryError, at steps of a kind on paths that contain ``part``."""

    def before(done: str, path: str) -> None:
        if done == kind and part in path:
            raise error or MemoryError("no more of it")

    return before


@asynccontextmanager
async def serving(directory: Path, disk: FaultyDisk, **config: str) -> AsyncIterator[Broker]:
    settings = CALM | {key.replace("_", "."): value for key, value in config.items()}
    async with Broker(directory, config=settings, fs=disk) as broker:
        yield broker


def fill(broker: Broker, topic: str, *, dead: bool = False) -> Partition:
    """Write sealed segments with one key; with ``dead`` the last record is a tombstone."""
    if broker.services.metadata.topic(topic) is None:
        create_topic(broker.services.metadata, topic, partitions=1, configs=COMPACTED)
    partition, now_ms = broker.services.logs.partition(topic, 0), broker.clock.now_ms()
    for number in range(6):
        value = None if dead and number == 5 else b"%d" % number * 100
        partition.append_records([Record(b"key", value)], now_ms=now_ms)
        if number % 2:
            partition.flushes.roll(now_ms)
    return partition


def is_clean(broker: Broker, topic: str) -> bool:
    return broker.services.logs.cleaned.get((topic, 0)) == 6


def maintenance(broker: Broker) -> Maintenance:
    assert broker._maintenance is not None
    return broker._maintenance


# --- the cleaner ---------------------------------------------------------------------------------


async def test_failed_compaction_is_followed_by_a_round_on_another_log(tmp_path):
    """A read fails with an unexpected error, and then removing the partial result fails."""
    disk = FaultyDisk()

    def before(kind: str, path: str) -> None:
        fault("read", "bad-0/00000000000000000002.log")(kind, path)
        fault("remove", "bad-0/", OSError(errno.EIO, "Input/output error"))(kind, path)

    with capture_logs() as told:
        async with serving(tmp_path, disk) as broker:
            fill(broker, "bad")
            disk.before = before
            cleaner = broker.cleaner
            await until_true(lambda: cleaner.uncleanable, "the round fails")
            assert list(cleaner.uncleanable) == [("bad", 0)]
            fill(broker, "good")
            await until_true(lambda: is_clean(broker, "good"), "the next round")
            disk.before = lambda _kind, _path: None
    (line,) = [logged for logged in told if logged["event"] == "partition cannot be compacted"]
    assert (line["partition"], line["cause"]) == ("bad-0", "MemoryError: no more of it")
    assert isinstance(line["exc_info"], MemoryError)
    assert (tmp_path / CLEAN_MARK).exists()


async def test_cleaner_waits_on_full_disk_without_marking_log_uncleanable(tmp_path):
    disk = FaultyDisk()
    with capture_logs() as told:
        async with serving(tmp_path, disk) as broker:
            fill(broker, "t")
            disk.before = fault("write", ".cleaned", OSError(errno.ENOSPC, "No space left"))
            waiting = lambda: [  # noqa: E731
                logged for logged in told if logged["event"] == "compaction has to wait"
            ]
            await until_true(lambda: len(waiting()) >= 2, "two rounds without room")
            assert not broker.cleaner.uncleanable
            assert not list((tmp_path / "t-0").glob("*.cleaned"))
            disk.before = lambda _kind, _path: None
            await until_true(lambda: is_clean(broker, "t"), "there is room")


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError("more")])
async def test_failed_cleaner_checkpoint_marks_no_partition_uncleanable(tmp_path, error):
    disk = FaultyDisk()
    async with serving(tmp_path, disk) as broker:
        disk.before = fault("write", CLEANER_CHECKPOINT, error)
        fill(broker, "one")
        await until_true(lambda: is_clean(broker, "one"), "the first round")
        disk.before = lambda _kind, _path: None
        fill(broker, "two")
        await until_true(lambda: is_clean(broker, "two"), "the second")
        assert not broker.cleaner.uncleanable
    stored = read_offsets(OsFileSystem(), str(tmp_path), CLEANER_CHECKPOINT)
    assert stored == {("one", 0): 6, ("two", 0): 6}


async def test_log_stays_cleanable_if_retention_runs_during_compaction(tmp_path):
    """Compaction continues although retention removes segments of a round.

    Rounds and retention are much more frequent than usual, and a round merges at most two adjacent
    segments. Merging all segments into one would leave nothing for retention: if the cleaner is as
    fast as the appends, the log never reaches ``retention.bytes``.
    """
    structlog.reset_defaults()  # a broker of another test may have silenced the log
    with capture_logs() as told:
        async with serving(
            tmp_path,
            FaultyDisk(),
            log_retention_check_interval_ms="1",
            log_initial_task_delay_ms="0",
            log_cleaner_backoff_ms="1",
        ) as broker:
            sizes = {"internal.segment.bytes": "5000", "retention.bytes": "4000"}
            configs = {**COMPACTED, "cleanup.policy": "compact,delete", **sizes}
            create_topic(broker.services.metadata, "t", partitions=1, configs=configs)
            partition = broker.services.logs.partition("t", 0)
            number = 0

            def grown() -> bool:
                nonlocal number
                number += 1
                now_ms = broker.clock.now_ms()
                for key in range(8):
                    record = Record(b"%d" % (number * 8 + key), b"v" * 200)
                    partition.append_records([record], now_ms=now_ms)
                partition.flushes.roll(now_ms)
                events = ("segments deleted", "compacted")
                done = [logged["event"] for logged in told if logged["event"] in events]
                return list(pairwise(done)).count(events) >= 5

            await until_true(grown, "five rounds, each right after a removal", deadline_s=300)
            assert not broker.cleaner.uncleanable
            assert partition.offline is None
    assert [logged for logged in told if logged["log_level"] == "error"] == []


# --- the cleaned offset of a log that has been replaced ---


async def cleaned_twice(services: Services, topic: str) -> dict[bytes | None, bytes | None]:
    """Run two rounds of compaction, delete.retention.ms apart; return the remaining records."""
    cleaner = Cleaner(services.logs, services.config, services.clock)
    partition = services.logs.partition(topic, 0)
    for _ in range(2):
        partition.flushes.roll(services.clock.now_ms())
        while await cleaner.run_once():
            pass
        assert isinstance(services.clock, ManualClock)
        services.clock.advance(86_400_001)
        partition.append_records([Record(b"next", b"")], now_ms=services.clock.now_ms())
    await cleaner.stop()
    return {
        record.key: record.value
        for header, batch in partition.reader.read_all()
        for record in decode_records(batch, 0, header)
    }


def write_and_take_back(services: Services, topic: str) -> None:
    partition, now_ms = services.logs.partition(topic, 0), services.clock.now_ms()
    for value in (b"secret", None):
        partition.append_records([Record(b"K", value)], now_ms=now_ms)


async def compacted(directory: Path) -> Services:
    """Return services with a topic ``t`` of seven records, cleaned up to offset 6."""
    services = Services(directory, clock=ManualClock(1_700_000_000_000))
    create_topic(services.metadata, "t", 1, COMPACTED)
    partition = services.logs.partition("t", 0)
    for number in range(6):
        partition.append_records([Record(b"%d" % (number % 2), b"x")], now_ms=number)
    partition.flushes.roll(6)
    partition.append_records([Record(b"7", b"")], now_ms=6)
    cleaner = Cleaner(services.logs, services.config, services.clock)
    assert await cleaner.run_once()
    await cleaner.stop()
    stored = read_offsets(OsFileSystem(), str(directory), CLEANER_CHECKPOINT)
    assert stored == {("t", 0): 6}
    return services


@pytest.mark.usefixtures("killed_logs_are_closed")
async def test_recreated_topic_keeps_no_tombstoned_record_after_a_kill(tmp_path):
    """The broker is killed after it wrote the topic's removal record, before it removed files."""
    services = await compacted(tmp_path)
    delete_topic(services.metadata, "t")
    again = Services(tmp_path, clock=services.clock)
    create_topic(again.metadata, "t", 1, COMPACTED)
    write_and_take_back(again, "t")
    assert read_offsets(OsFileSystem(), str(tmp_path), CLEANER_CHECKPOINT) == {}
    # Killed once more.
    last = Services(tmp_path, clock=services.clock)
    assert b"K" not in await cleaned_twice(last, "t")


@pytest.mark.usefixtures("killed_logs_are_closed")
async def test_recreated_topic_is_not_writable_until_cleaner_checkpoint_is_written(tmp_path):
    services = await compacted(tmp_path)
    delete_topic(services.metadata, "t")
    disk = FaultyDisk()
    again = Services(tmp_path, fs=disk, clock=services.clock)
    create_topic(again.metadata, "t", 1, COMPACTED)
    disk.before = fault("write", CLEANER_CHECKPOINT, OSError(errno.ENOSPC, "No space left"))
    with pytest.raises(StorageError, match="checkpoints cannot be written"):
        write_and_take_back(again, "t")
    disk.before = lambda _kind, _path: None
    write_and_take_back(again, "t")
    assert read_offsets(OsFileSystem(), str(tmp_path), CLEANER_CHECKPOINT) == {}


@pytest.mark.usefixtures("killed_logs_are_closed")
async def test_truncated_log_keeps_no_tombstoned_record_below_cleaned_offset(tmp_path):
    services = await compacted(tmp_path)
    services.logs.partition("t", 0).flushes.run(0)
    services.logs.checkpoint()
    # After a power loss only the beginning of the first segment is left.
    directory = tmp_path / "t-0"
    for path in directory.iterdir():
        if path.name.startswith(f"{6:020}"):
            path.unlink()
    first = directory / f"{0:020}.log"
    first.write_bytes(first.read_bytes()[: first.stat().st_size // 2])
    again = Services(tmp_path, clock=services.clock)
    end = again.logs.partition("t", 0).log_end_offset
    assert end < 6
    assert again.logs.cleaned == {("t", 0): end}
    assert read_offsets(OsFileSystem(), str(tmp_path), CLEANER_CHECKPOINT) == {("t", 0): end}
    write_and_take_back(again, "t")
    assert b"K" not in await cleaned_twice(again, "t")


@pytest.mark.usefixtures("killed_logs_are_closed")
async def test_compaction_of_deleted_topic_sets_no_cleaned_offset_of_its_successor(tmp_path):
    services = await Services(tmp_path).start()
    create_topic(services.metadata, "t", 1, COMPACTED)
    write_and_take_back(services, "t")
    partition = services.logs.partition("t", 0)
    partition.flushes.roll(services.clock.now_ms())
    cleaner = Cleaner(services.logs, services.config, services.clock)
    cleaner.start()
    await cleaner.stop()
    rounds = Cleaner(services.logs, services.config, services.clock)
    clean = rounds._clean

    async def clean_and_lose(*whole: Any) -> bool:
        done = await clean(*whole)
        delete_topic(services.metadata, "t")
        create_topic(services.metadata, "t", 1, COMPACTED)
        return done

    rounds._clean = clean_and_lose  # type: ignore[method-assign]
    assert await rounds.run_once()
    await rounds.stop()
    assert services.logs.cleaned == {}
    await services.stop()


# --- maintenance ---------------------------------------------------------------------------------


async def test_retention_failure_of_one_log_does_not_stop_the_others(tmp_path):
    disk = FaultyDisk()
    with capture_logs() as told:
        async with serving(
            tmp_path, disk, log_retention_check_interval_ms="10", log_initial_task_delay_ms="0"
        ) as broker:
            for name in ("bad", "good"):
                create_topic(
                    broker.services.metadata, name, partitions=1, configs={"retention.ms": "1"}
                )
                partition = broker.services.logs.partition(name, 0)
                partition.append_records([Record(b"k", b"v")], now_ms=1)
            disk.before = fault("rename", f"/bad-0/{0:020}.log")
            good = broker.services.logs.partition("good", 0)
            await until_true(lambda: good.log_start_offset == 1, "retention of the good one")
            marked = maintenance(broker)._troubled
            await until_true(lambda: marked.get("retention"), "the mark")
            assert marked["retention"] == {"bad-0": "MemoryError: no more of it"}
            good.append_records([Record(b"k", b"v")], now_ms=1)
            await until_true(lambda: good.log_start_offset == 2, "the next round")
            disk.before = lambda _kind, _path: None
            await until_true(lambda: not marked["retention"], "the mark is gone")
    lines = [logged for logged in told if logged.get("what") == "retention"]
    assert [line["partition"] for line in lines] == ["bad-0"], "told once, not in every round"
    assert (tmp_path / CLEAN_MARK).exists()


@pytest.mark.parametrize(
    ("interval", "name"),
    [
        ("replica.high.watermark.checkpoint.interval.ms", "replication-offset-checkpoint"),
        ("log.flush.offset.checkpoint.interval.ms", "recovery-point-offset-checkpoint"),
        ("log.flush.start.offset.checkpoint.interval.ms", "log-start-offset-checkpoint"),
    ],
)
async def test_failed_checkpoint_is_written_in_the_next_interval(tmp_path, interval, name):
    disk, failures = FaultyDisk(), []

    def before(kind: str, path: str) -> None:
        if kind == "write" and f"/{name}" in path:
            failures.append(path)
            raise MemoryError("no more of it")

    with capture_logs() as told:
        async with serving(tmp_path, disk, **{interval.replace(".", "_"): "10"}) as broker:
            create_topic(broker.services.metadata, "t", partitions=1)
            partition = broker.services.logs.partition("t", 0)
            partition.append_records([Record(b"k", b"v")], now_ms=1)
            disk.before = before
            partition.cleanup.delete_records_before(1)
            partition.flushes.run(0)
            await until_true(lambda: len(failures) >= 2, "two failures")
            disk.before = lambda _kind, _path: None

            def offset() -> int | None:
                return read_offsets(OsFileSystem(), str(tmp_path), name).get(("t", 0))

            await until_true(lambda: offset() == 1, "the next one")
    assert {
        logged["what"] for logged in told if logged.get("cause") == "MemoryError: no more of it"
    } == {name}
    assert (tmp_path / CLEAN_MARK).exists()


# --- flushes -------------------------------------------------------------------------------------


async def test_flush_with_unexpected_exception_takes_only_its_partition_offline(tmp_path):
    """A flush raises an error other than OSError; the next flush, of another log, succeeds."""
    disk = FaultyDisk()
    with capture_logs() as told:
        async with serving(tmp_path, disk, flush_messages="1") as broker:
            for name in ("bad", "good"):
                create_topic(broker.services.metadata, name, partitions=1)
            bad, good = (broker.services.logs.partition(name, 0) for name in ("bad", "good"))
            disk.before = fault("sync", "/bad-0/")
            told_of = []
            for partition in (bad, good):
                partition.append_records([Record(b"k", b"v")], now_ms=1)
                assert broker.services.flusher.after(
                    [partition], lambda flushed=partition: told_of.append(flushed)
                )
            await until_true(lambda: len(told_of) == 2, "both are told")
            assert bad.offline is not None
            assert bad.high_watermark == 0
            assert good.high_watermark == 1
            good.append_records([Record(b"k", b"v")], now_ms=1)
            await until_true(lambda: good.high_watermark == 2, "the next flush")
            disk.before = lambda _kind, _path: None
    assert [logged["partition"] for logged in told if logged["event"] == "partition off line"] == [
        "bad-0"
    ]
    assert not (tmp_path / CLEAN_MARK).exists()


# --- shutdown -------------------------------------------------------------------------------------


async def test_shutdown_closes_the_other_logs_if_one_fails(tmp_path):
    disk = FaultyDisk()
    with capture_logs() as told:
        async with serving(tmp_path, disk) as broker:
            for name in ("a", "bad", "z"):
                create_topic(broker.services.metadata, name, partitions=1)
                broker.services.logs.partition(name, 0).append_records(
                    [Record(b"k", b"v")], now_ms=broker.clock.now_ms()
                )
            disk.before = fault("write", "/bad-0/")
            disk.write_fails = lambda path: "__fencepost" in path
            partitions = list(broker.services.logs)
    (line,) = [logged for logged in told if logged["event"] == "log not closed cleanly"]
    assert line["partition"] == "bad-0"
    assert not (tmp_path / CLEAN_MARK).exists()
    stored = read_offsets(OsFileSystem(), str(tmp_path), "recovery-point-offset-checkpoint")
    assert [stored[name, 0] for name in ("a", "z")] == [1, 1]
    for partition in partitions:
        assert partition.log.is_empty, "its files are closed"
    # The lock is released, and no record is lost.
    async with serving(tmp_path, FaultyDisk()) as broker:
        assert broker.services.logs.partition("bad", 0).log_end_offset == 1


async def test_shutdown_closes_every_log_if_a_service_fails(tmp_path, monkeypatch):
    """An error is injected into each service, one at a time."""
    async with serving(tmp_path, FaultyDisk()) as broker:
        create_topic(broker.services.metadata, "t", partitions=1)
        broker.services.logs.partition("t", 0).append_records([Record(b"k", b"v")], now_ms=1)
        names = [what for what, _ in broker._shutdown_steps()]
    assert names[-2:] == ["close the logs", "give up the lock"]

    def failing(steps: list[tuple[str, object]], at: int) -> list[tuple[str, object]]:
        def fail() -> None:
            raise MemoryError("no more of it")

        return [*steps[:at], (steps[at][0], fail), *steps[at + 1 :]]

    for at in range(len(names) - 2):
        broker = Broker(tmp_path, config=CALM)
        await broker.start()
        steps = broker._shutdown_steps()
        undone = steps[at][1]
        monkeypatch.setattr(
            broker, "_shutdown_steps", lambda steps=steps, at=at: failing(steps, at)
        )
        with capture_logs() as told:
            await broker.stop()
        assert [logged["what"] for logged in told if logged.get("cause")] == [names[at]]
        assert (tmp_path / CLEAN_MARK).exists(), names[at]
        result = undone()
        if result is not None:
            await result
