"""The broker's background work never blocks the event loop for long, even if all work is due."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fencepost.coordinator.daemon.broker import Broker
from fencepost.groups.commands import FetchOffsets, FetchOffsetsResult, ListGroups
from fencepost.groups.records import OffsetCommitValue, offset_commit
from fencepost.logcore.batch import LogRecord, encode_batch
from fencepost.logcore.checkpoints import RECOVERY_POINT_CHECKPOINT
from fencepost.logcore.machine import EndMarker, ProducerStamp, Record
from tests.support.metadata_changes import create_topic, set_broker_configs
from tests.support.partitions import append_batch
from tests.support.stalls import watched_loop
from tests.support.waits import until_async
from tests.unit.coordinator.services.coordinators import reload

pytestmark = pytest.mark.slow

PARTITIONS = 300
PRODUCERS = 20_000
SEGMENTS = 1_500
TOPICS = 8_000
OFFSETS = 100_000
BUSY = {
    "log.cleaner.backoff.ms": "10",
    "log.initial.task.delay.ms": "0",
    "log.retention.check.interval.ms": "50",
    "log.flush.offset.checkpoint.interval.ms": "50",
    "log.flush.start.offset.checkpoint.interval.ms": "50",
    "replica.high.watermark.checkpoint.interval.ms": "50",
    "producer.id.expiration.check.interval.ms": "500",
}
COMPACTED = {
    "cleanup.policy": "compact,delete",
    "segment.bytes": "1048576",
    "min.cleanable.dirty.ratio": "0",
}


async def test_maintenance_of_many_partitions_during_compaction_does_not_block_the_loop(
    tmp_path: Path,
) -> None:
    async with Broker(tmp_path, config=BUSY | {"log.cleaner.enable": "false"}) as broker:
        create_topic(broker.services.metadata, "many", partitions=PARTITIONS)
        create_topic(broker.services.metadata, "keyed", partitions=1, configs=COMPACTED)
        now_ms = broker.clock.now_ms()
        for index in range(PARTITIONS):
            partition = broker.services.logs.partition("many", index)
            partition.append_records([Record(b"k", b"v")], now_ms=now_ms)
            await asyncio.sleep(0)
        keyed = broker.services.logs.partition("keyed", 0)
        crowded = broker.services.logs.partition("many", 0)
        for producer_id in range(PRODUCERS):
            crowded.append_marker(EndMarker(ProducerStamp(producer_id, 0), True), now_ms)
            if producer_id % 100 == 0:
                await asyncio.sleep(0)
        for _ in range(100):
            records = [LogRecord(at, now_ms, b"%d" % (at % 100), b"v" * 100) for at in range(1_000)]
            append_batch(keyed, encode_batch(records), now_ms=now_ms)
            await asyncio.sleep(0)
    async with Broker(tmp_path, config=BUSY) as broker:
        with watched_loop() as watch:

            async def compacted() -> bool:
                return ("keyed", 0) in broker.services.logs.cleaned

            await until_async(compacted, "a round of compaction")
            broker.services.logs.partition("many", 0).flushes.roll(now_ms)
            await broker.services.logs.save(RECOVERY_POINT_CHECKPOINT)
        watch.check()
        assert broker.cleaner is not None
        assert not broker.cleaner.uncleanable


async def test_retention_of_thousands_of_segments_does_not_block_the_loop(tmp_path: Path) -> None:
    async with Broker(tmp_path, config={"log.initial.task.delay.ms": "3600000"}) as broker:
        create_topic(broker.services.metadata, "t", partitions=1, configs={"retention.ms": "1"})
        partition, now_ms = broker.services.logs.partition("t", 0), broker.clock.now_ms()
        for _ in range(SEGMENTS):
            partition.append_records([Record(b"k", b"v")], now_ms=1)
            partition.flushes.roll(now_ms)
            await asyncio.sleep(0)
        assert broker._maintenance is not None
        with watched_loop() as watch:
            # Run retention as a separate task: the watch measures the steps of tasks.
            await asyncio.create_task(broker._maintenance.run_retention(partition))
        watch.check()
        assert partition.log_start_offset == SEGMENTS


async def test_broker_config_change_for_thousands_of_topics_does_not_block_the_loop(
    tmp_path: Path,
) -> None:
    async with Broker(tmp_path) as broker:
        metadata, logs = broker.services.metadata, broker.services.logs
        with metadata.unforced():
            for number in range(TOPICS):
                create_topic(metadata, f"t{number}", 1, {"retention.ms": str(number)})
        ends = [logs.partition(name, 0) for name in ("t0", f"t{TOPICS - 1}")]

        async def change() -> None:
            set_broker_configs(metadata, "1", {"log.segment.bytes": "2097152"})
            set_broker_configs(metadata, "1", {"log.segment.bytes": "1048576"})

        async def followed() -> bool:
            return all(end.log.config.segment_bytes == 1_048_576 for end in ends)

        with watched_loop() as watch:
            await asyncio.create_task(change())
            await until_async(followed, "all logs have the new setting")
        watch.check()
        assert [end.log.config.retention_ms for end in ends] == [0, TOPICS - 1]


async def test_offset_deletion_and_expiration_in_a_large_partition_do_not_block_the_loop(
    tmp_path: Path,
) -> None:
    """Most offsets are only checked and stay; groups with a single offset expire."""
    lasting = [(f"large{number}", "t", OFFSETS) for number in range(2)]
    going = [("mixed", "deleted", 20_000), *((f"g{number}", "t", 1) for number in range(5_000))]
    async with Broker(tmp_path, config={"offsets.topic.num.partitions": "1"}) as broker:
        groups, now_ms = broker.services.groups, broker.clock.now_ms()
        for _ in groups.open_in_steps():
            pass
        for group_id, topic, count in (*lasting, *going):
            value = OffsetCommitValue(5, -1, "", 1 if group_id.startswith("g") else now_ms)
            for at in range(0, count, 5_000):
                indexes = range(at, min(at + 5_000, count))
                records = [offset_commit(group_id, topic, index, value) for index in indexes]
                groups.partition_of(group_id).append_records(records, now_ms=now_ms)
        await reload(groups._shards, 0)

        async def names() -> list[str]:
            return [group.group_id for group in (await groups.list_groups(ListGroups())).groups]

        async def only_large_ones() -> bool:
            return await names() == ["large0", "large1"]

        assert len(await names()) == 5_003
        with watched_loop() as watch:
            await asyncio.create_task(groups.on_topics_deleted([("deleted", None)]))
            asked = FetchOffsets("mixed", None)

            async def without_topic() -> bool:
                return await groups.submit("mixed", asked) == FetchOffsetsResult(())

            await until_async(without_topic, "the topic is forgotten")
            groups._send_upkeep("upkeep", now_ms)
            await until_async(only_large_ones, "expired ones are forgotten")
        watch.check()
