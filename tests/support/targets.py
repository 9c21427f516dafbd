"""The brokers a scenario can run against. A scenario knows one only by its bootstrap address."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

SETTINGS: Mapping[str, str] = {
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "500",
    "group.consumer.heartbeat.interval.ms": "200",
    "group.consumer.min.heartbeat.interval.ms": "200",
    "group.consumer.assignment.interval.ms": "0",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
    "auto.create.topics.enable": "false",
    "log.retention.ms": "-1",
    "num.partitions": "1",
    "delete.topic.enable": "true",
}
"""Broker settings that every target gets: short waits, small internal topics.

Records bear any time that a scenario likes. Half a minute after its start, and then every five, a
broker would delete those older than a week, from under whatever test runs just then.
"""


class Target(Protocol):
    """A running broker."""

    name: str
    """``fencepost`` or ``kafka``."""

    bootstrap: str
    """HOST:PORT."""

    data_dir: Path
    """Where its partition directories are."""

    def stop(self) -> None:
        """End it in an orderly way."""
