"""The cleaner of a running broker: compacted logs stay readable, failed rounds change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from fencepost.coordinator.config.broker_config import ConfigError
from fencepost.coordinator.daemon.broker import Broker
from fencepost.logcore.batch import LogRecord, encode_batch
from tests.support.metadata_changes import create_topic
from tests.support.partitions import append_batch
from tests.support.stalls import watched_loop
from tests.support.waits import until_true

SETTINGS = {
    "log.cleaner.backoff.ms": "10",
    "log.segment.bytes": "1048576",
    "log.cleaner.min.cleanable.ratio": "0.01",
}
TOPIC = {"cleanup.policy": "compact", "segment.bytes": "1048576", "min.cleanable.dirty.ratio": "0"}


def fill(broker: Broker, topic: str, rounds: int) -> None:
    """Write the same hundred keys repeatedly, one megabyte per round."""
    partition = broker.services.logs.partition(topic, 0)
    for number in range(rounds):
        records = [
            LogRecord(at, broker.clock.now_ms(), b"key %d" % at, b"%d" % number + b"." * 10_000)
            for at in range(100)
        ]
        append_batch(partition, encode_batch(records, base_offset=0), now_ms=broker.clock.now_ms())


def contents(broker: Broker, topic: str) -> dict[bytes, bytes]:
    from fencepost.logcore.batch import decode_records

    partition = broker.services.logs.partition(topic, 0)
    return {
        record.key: record.value
        for header, view in partition.reader.read_all()
        for record in decode_records(view, 0, header)
    }


async def make(broker: Broker, name: str) -> None:
    create_topic(broker.services.metadata, name, partitions=1, configs=TOPIC)


async def test_compacted_topic_shrinks_and_keeps_latest_value_of_each_key(tmp_path: Path) -> None:
    config = {**SETTINGS, "message.max.bytes": "1040000", "log.cleaner.enable": "true"}
    async with Broker(tmp_path, config=config) as broker:
        await make(broker, "c")
        fill(broker, "c", 8)
        before = contents(broker, "c")
        full = 8 * 1_000_000
        partition = broker.services.logs.partition("c", 0)
        await until_true(lambda: partition.log.size_bytes < full / 2, "the log shrinks")
        await until_true((tmp_path / "cleaner-offset-checkpoint").exists, "the round ends")
        assert contents(broker, "c") == before
        end = partition.log_end_offset
    async with Broker(tmp_path, config=config) as broker:
        assert contents(broker, "c") == before
        assert broker.services.logs.partition("c", 0).log_end_offset == end


async def test_event_loop_stays_responsive_while_a_log_is_compacted(tmp_path: Path) -> None:
    config = {**SETTINGS, "message.max.bytes": "1040000"}
    async with Broker(tmp_path, config=config) as broker:
        await make(broker, "c")
        fill(broker, "c", 30)
        partition = broker.services.logs.partition("c", 0)
        with watched_loop() as watch:
            await until_true(lambda: partition.log.size_bytes < 15_000_000, "half of it is gone")
        watch.check()


async def test_shutdown_during_compaction_loses_no_record(tmp_path: Path) -> None:
    config = {
        **SETTINGS,
        "message.max.bytes": "1040000",
        "log.cleaner.io.max.bytes.per.second": "2000000",
    }
    async with Broker(tmp_path, config=config) as broker:
        await make(broker, "c")
        fill(broker, "c", 4)
        before = contents(broker, "c")
        await until_true(lambda: list((tmp_path / "c-0").glob("*.cleaned")), "a round is under way")
    async with Broker(tmp_path, config={**config, "log.cleaner.enable": "false"}) as broker:
        assert contents(broker, "c") == before
        assert not list((tmp_path / "c-0").glob("*.cleaned"))


async def test_corrupt_log_is_marked_uncleanable_and_left_unchanged(tmp_path: Path) -> None:
    config = {**SETTINGS, "message.max.bytes": "1040000"}
    async with Broker(tmp_path, config={**config, "log.cleaner.enable": "false"}) as broker:
        await make(broker, "c")
        fill(broker, "c", 4)
    log = tmp_path / "c-0" / f"{0:020}.log"
    data = bytearray(log.read_bytes())
    data[500] ^= 0xFF
    log.write_bytes(data)
    async with Broker(tmp_path, config=config) as broker:
        cleaner = broker.cleaner
        await until_true(lambda: cleaner.uncleanable, "the damage is found")
        assert list(cleaner.uncleanable) == [("c", 0)]
        assert log.read_bytes() == data


@pytest.mark.parametrize("value", ["0", "none"])
def test_cleaner_io_limit_of_zero_is_a_config_error(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"log\.cleaner\.io\.max"):
        Broker(tmp_path, config={"log.cleaner.io.max.bytes.per.second": value})
