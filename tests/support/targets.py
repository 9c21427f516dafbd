"""The brokers that a scenario can run against, and their common settings."""

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
    "group.share.heartbeat.interval.ms": "200",
    "group.share.min.heartbeat.interval.ms": "200",
    "group.share.assignment.interval.ms": "0",
    "share.coordinator.state.topic.num.partitions": "4",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
    "auto.create.topics.enable": "false",
    "log.retention.ms": "-1",
    "num.partitions": "1",
    "delete.topic.enable": "true",
}
"""Broker settings that every target gets: short waits, small internal topics, no retention.

Scenarios produce records with arbitrary timestamps, so a retention check, which runs every five
minutes, could delete them during a test.
"""


class Target(Protocol):
    """A running broker."""

    name: str
    """``fencepost`` or ``kafka``."""

    bootstrap: str
    """HOST:PORT."""

    data_dir: Path
    """The folder of its partition directories."""

    def stop(self) -> None:
        """Stop it cleanly."""
