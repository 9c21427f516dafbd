"""Retention and compaction of user topics in simulated runs, and which records they may remove."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from fencepost.client.requests import Partition
from fencepost.logcore.batch import LogRecord, encode_batch
from tests.sim.daemon import Daemon
from tests.sim.framed import Log, Producer, Promises
from tests.sim.invariants import BrokenInvariantError
from tests.sim.machine import EPOCH_MS

RETAIN: Final = "retain"
"""The fault that changes the retention of a topic."""
BY_APPEND_TIME: Final = {"message.timestamp.type": "LogAppendTime"}
"""Settings of a topic with retention; without them all its records would have one timestamp."""
CHECKS: Final = {"log.retention.check.interval.ms": 150, "log.initial.task.delay.ms": 100}
"""Broker settings with which retention runs often."""

KEYS: Final = 3
COMPACTS: Final = {
    **BY_APPEND_TIME,
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.01",
    "segment.ms": "60",
}
CLEANER: Final = {"log.cleaner.backoff.ms": 100}
"""Broker settings with which compaction runs often."""


class Retention:
    """The log start offsets of all brokers, and the retention that operators have requested."""

    def __init__(self, promises: Promises, *, loses: bool) -> None:
        self._promises, self._loses = promises, loses
        self._least_ms = math.inf
        """The shortest requested ``retention.ms``; 0 if ``retention.bytes`` was requested."""

    def requested(self, retention_ms: int) -> None:
        """Note a request for this ``retention.ms``; 0 stands for ``retention.bytes``."""
        self._least_ms = min(self._least_ms, retention_ms)

    def look(self, brokers: Iterable[Daemon], now_ms: int) -> None:
        """Note all log start offsets.

        Raises BrokenInvariantError for an acknowledged record that was deleted too early.
        """
        for broker in brokers:
            services = broker.opened
            for partition in () if services is None else services.storage.logs:
                place, start = (partition.topic, partition.index), partition.log_start_offset
                former = self._promises.deleted.get(place, 0)
                if start > former:
                    self._check_age(place, range(former, start), now_ms)
                    self._promises.deleted[place] = start

    def _check_age(self, place: Partition, deleted: range, now_ms: int) -> None:
        if self._loses or not self._least_ms:
            return
        for offset, values in self._promises.appended.get(place, {}).items():
            # The age of a batch is at most the age of the request that first sent it.
            age_ms = now_ms - self._promises.made_ms[values[0]]
            if offset in deleted and age_ms <= self._least_ms:
                raise BrokenInvariantError(
                    f"{place}: {values} at {offset} were deleted at the age of {age_ms} ms"
                )


class KeyedProducer(Producer):
    """Appends records with keys; it is not idempotent."""

    def _encode(self, values: tuple[str, ...]) -> bytes:
        return encode_batch(
            [
                LogRecord(at, EPOCH_MS, key_of(value), value.encode())
                for at, value in enumerate(values)
            ]
        )


def key_of(value: str) -> bytes:
    """Return the key of a producer's value."""
    return str(int(value.rpartition(":")[2]) % KEYS).encode()


def check_compacted(promises: Promises, place: Partition, log: Log) -> None:
    """Raise BrokenInvariantError if a missing acknowledged record has no later one of its key."""
    newest: dict[bytes, int] = {}
    for at, value in log.items():
        newest[key_of(value)] = max(newest.get(key_of(value), -1), at)
    for offset, values in promises.appended.get(place, {}).items():
        for at, value in enumerate(values, offset):
            if log.get(at, value) != value:
                raise BrokenInvariantError(f"{place}: {log[at]} is at {at} instead of {value}")
            if at not in log and newest.get(key_of(value), -1) < at:
                raise BrokenInvariantError(f"{place}: {value} at {at} was the last of its key")
