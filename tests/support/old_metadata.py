"""The metadata log of Fencepost 0.1, in which each change has a key and a value (msgpack)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from fencepost.coordinator.metadata.names import METADATA_TOPIC, METADATA_TOPIC_ID
from fencepost.logcore.config import LogConfig
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.machine import Record
from fencepost.logcore.partition import Partition
from tests.support.clock import ManualClock


def record(kind: str, name: str, value: Mapping[str, Any] | None) -> Record:
    """Return the record of one change: the whole new state, None for a deletion."""
    packed = None if value is None else msgpack.packb({"version": 1, **value})
    return Record(msgpack.packb([kind, name]), packed)


def topic(
    name: str,
    topic_id: uuid.UUID,
    partitions: int,
    configs: Mapping[str, str] | None = None,
    *,
    first_start: int,
) -> Record:
    value = {
        "id": topic_id.bytes,
        "partitions": partitions,
        "configs": dict(configs or {}),
        "first_start": first_start,
    }
    return record("topic", name, value)


def settings(scope: str, configs: Mapping[str, str]) -> Record:
    return record("broker-configs", scope, {"configs": dict(configs)} if configs else None)


def starts(count: int) -> Record:
    return record("starts", "", {"count": count})


def write_old_log(fs: FileSystem, directory: str, records: Sequence[Record]) -> None:
    """Write a log as a killed broker leaves it, with one batch for each of these records."""
    clock = ManualClock(1_700_000_000_000)
    partition = Partition.open(
        fs,
        f"{directory}/{METADATA_TOPIC}-0",
        topic=METADATA_TOPIC,
        index=0,
        topic_id=METADATA_TOPIC_ID,
        config=LogConfig(segment_bytes=16 << 20, retention_ms=-1, cleanup_policy=frozenset()),
        clock=clock,
        clean=False,
    )
    for value in records:
        partition.append_records([value], now_ms=clock.now_ms())
    partition.flushes.run(clock.now_ms())
