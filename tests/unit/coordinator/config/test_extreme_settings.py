"""Background work and restarts must not fail with minimum and maximum numeric settings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

from fencepost.cluster.controller.configs import AlterConfig, OpType
from fencepost.cluster.image import BROKER_RESOURCE
from fencepost.coordinator.broker_services import Services
from fencepost.coordinator.config.broker_config import (
    BROKER_KEYS,
    TOPIC_KEYS,
    ConfigError,
    ConfigKey,
    ConfigType,
)
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.metadata.config_checks import check_configs, list_default
from fencepost.logcore.batch import LogRecord, encode_batch
from fencepost.logcore.machine import Record
from tests.support.batches import NOW_MS
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon
from tests.support.metadata_changes import create_topic
from tests.support.waits import until

CALM = {
    "log.initial.task.delay.ms": "3600000",
    "log.cleaner.enable": "false",
    "log.cleaner.backoff.ms": "3600000",
}
TOPIC = {
    "cleanup.policy": "compact,delete",
    "segment.bytes": "1048576",
    "min.cleanable.dirty.ratio": "0",
}
LARGEST: Mapping[ConfigType, float] = {
    ConfigType.SHORT: 2**15 - 1,
    ConfigType.INT: 2**31 - 1,
    ConfigType.LONG: 2**63 - 1,
    ConfigType.DOUBLE: 1.7e308,
}
CLEANER_RATE = "log.cleaner.io.max.bytes.per.second"
SLOWEST = "1.0"
DYNAMIC = {name: key for name, key in BROKER_KEYS.items() if key.updatable}


def ends(key: ConfigKey) -> list[str]:
    """Return the smallest, the largest and common special accepted values, as strings."""
    most = LARGEST[key.type]
    asked = {-most - 1, most, -1, 0, 1, key.low, key.high} - {None}
    accepted = []
    for value in asked:
        text = str(float(value) if key.type is ConfigType.DOUBLE else int(value))
        try:
            key.parse(text)
        except ConfigError:
            continue
        accepted.append(text)
    return sorted(accepted)


def is_between(text: str, key: ConfigKey) -> bool:
    """Return whether the key accepts both a lower and a higher value of ``ends``."""
    values = sorted(map(float, ends(key)))
    return values[0] < float(text) < values[-1]


def numbers(keys: Mapping[str, ConfigKey]) -> Iterator[tuple[str, str]]:
    for name, key in keys.items():
        if key.type in LARGEST:
            yield from ((name, text) for text in ends(key))


def extreme(largest: bool) -> dict[str, str]:
    """Return all numeric topic settings with their largest (or smallest) values, if compatible."""
    chosen: dict[str, str] = {}
    for name, text in numbers(TOPIC_KEYS):
        better = (float(text) > float(chosen[name])) is largest if name in chosen else True
        if better and name != "min.compaction.lag.ms":
            chosen[name] = text
    return chosen


def change(services: Services, setting: AlterConfig) -> None:
    """Alter a cluster-wide broker setting."""
    services.active_controller.decide(
        lambda controller: controller.incremental_alter_configs(
            (BROKER_RESOURCE, ""),
            [setting],
            check_configs=partial(check_configs, services.config),
            list_default=list_default,
        )
    )


async def bear(
    directory: Path, topics: Mapping[str, Mapping[str, str]], broker_key: AlterConfig | None = None
) -> None:
    """Run all background work, stop and restart, and do the same once more.

    ``topics`` maps names to settings.
    """
    for start in range(2):
        async with Broker(directory, config=CALM) as broker:
            for topic, configs in topics.items() if not start else ():
                create_topic(
                    broker.services.metadata, topic, partitions=1, configs={**TOPIC, **configs}
                )
            if broker_key is not None and not start:
                change(broker.services, broker_key)
            assert broker.cleaner is not None
            assert broker._maintenance is not None
            partitions = {name: broker.services.logs.partition(name, 0) for name in topics}
            for partition in partitions.values():
                for number in range(4):
                    records = [Record(b"k", b"%d" % number * 300), Record(b"%d" % number, None)]
                    partition.append_records(records, now_ms=broker.clock.now_ms())
                    partition.flushes.roll(broker.clock.now_ms())
            for _ in range(3):
                for _ in topics:
                    await broker.cleaner.run_once()
                for log in broker.services.logs:
                    broker._maintenance.run_flush(log)
                    await broker._maintenance.run_retention(log)
                    broker._maintenance.run_producer_expiry(log)
            assert not broker.cleaner.uncleanable
            assert [log.offline for log in broker.services.logs if log.offline] == []
            ends = {name: partition.log_end_offset for name, partition in partitions.items()}
            assert ends == dict.fromkeys(topics, 8 * (start + 1))
    assert (directory / ".kafka_cleanshutdown").exists()


async def test_topic_config_at_its_minimum_or_maximum_allows_maintenance_and_restart(
    tmp_path: Path,
) -> None:
    topics = {f"{name}_{text}": {name: text} for name, text in numbers(TOPIC_KEYS)}
    assert len(topics) > 60
    await bear(tmp_path, topics)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        # ``make slow`` also tests 0 and 1 if they are between the bounds.
        pytest.param(
            *number, marks=[pytest.mark.slow] if is_between(number[1], DYNAMIC[number[0]]) else []
        )
        for number in numbers(DYNAMIC)
        if number != (CLEANER_RATE, SLOWEST)
    ],
)
async def test_broker_config_at_its_minimum_or_maximum_allows_maintenance_and_restart(
    tmp_path: Path, name: str, text: str
) -> None:
    await bear(tmp_path, {"t": {}}, AlterConfig(name, OpType.SET, text))


@pytest.mark.parametrize("way_out", ["a higher rate", "a stop"])
async def test_throttled_cleaner_continues_on_a_higher_rate_and_ends_on_shutdown(
    tmp_path: Path, way_out: str
) -> None:
    """At one byte per second, cleaning a few records would take an hour."""

    def set_rate(text: str) -> None:
        change(broker.services, AlterConfig(CLEANER_RATE, OpType.SET, text))

    async with Broker(tmp_path, config=CALM) as broker:
        create_topic(broker.services.metadata, "t", partitions=1, configs=TOPIC)
        set_rate(SLOWEST)
        partition = broker.services.logs.partition("t", 0)
        for _ in range(4):
            partition.append_records([Record(b"k", b"v" * 300)], now_ms=broker.clock.now_ms())
            partition.flushes.roll(broker.clock.now_ms())
        assert broker.cleaner is not None
        round_of_cleaning = asyncio.create_task(broker.cleaner.run_once())
        _, waiting = await asyncio.wait({round_of_cleaning}, timeout=0.5)
        assert waiting
        if way_out == "a higher rate":
            set_rate("1e9")
            await asyncio.wait_for(round_of_cleaning, 60)
    await asyncio.wait_for(round_of_cleaning, 60)


@pytest.mark.parametrize("largest", [False, True])
async def test_all_topic_configs_at_the_same_extreme_allow_maintenance_and_restart(
    tmp_path: Path, largest: bool
) -> None:
    configs = extreme(largest)
    assert len(configs) > 20
    await bear(tmp_path, {"t": configs})


async def test_contradicting_broker_and_topic_compaction_lags_do_not_fail_cleaning(
    tmp_path: Path,
) -> None:
    """Each setting is valid by itself, and cleaning waits until both settings permit cleaning."""
    await bear(
        tmp_path,
        {"t": {"min.compaction.lag.ms": "1000"}},
        AlterConfig("log.cleaner.max.compaction.lag.ms", OpType.SET, "500"),
    )


def test_log_with_maximum_delete_retention_ms_is_compacted_and_broker_stops(tmp_path: Path) -> None:
    """The delete horizon is later than any timestamp, and too large for a batch."""
    settings = {"log.cleaner.backoff.ms": "50", "log.roll.ms": "1"}
    daemon = Daemon(tmp_path / "data", settings).start()
    try:
        with Cluster(daemon.bootstrap) as client:
            for name in ("for-ever", "other"):
                configs = {**TOPIC, "cleanup.policy": "compact", "segment.ms": "1"}
                client.create_topic(
                    name, configs={**configs, "delete.retention.ms": str(2**63 - 1)}
                )
                for number in range(4):
                    value = None if number == 2 else b"%d" % number * 300
                    told = client.produce(name, keyed(b"k%d" % (number // 2), value, number))
                    assert told["error_code"] == "none"
            checkpoint = tmp_path / "data" / "cleaner-offset-checkpoint"
            cleaned = lambda: checkpoint.exists() and checkpoint.read_text().split("\n")[1] == "2"  # noqa: E731
            until(cleaned, "both logs are compacted")
        daemon.stop()
    finally:
        daemon.kill()


def keyed(key: bytes, value: bytes | None, number: int) -> bytes:
    """Return a batch of one record, over ``segment.ms`` later than the previous record."""
    return encode_batch([LogRecord(0, NOW_MS + 10 * number, key, value)])
