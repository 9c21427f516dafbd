"""Log directories that brokers have lost, and the replicas in them.

A broker creates a notification when it loses a log directory, without naming the replicas. The
controller therefore sends the broker a LeaderAndIsr with all of its replicas, and the response
names the offline ones. An offline replica is removed from its ISR and cannot lead, until a response
reports it as online or the broker registers again.

Source: ``KafkaController.processLogDirEventNotification``, ``processLeaderAndIsrResponseReceived``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from operator import methodcaller
from typing import Final

import structlog
from kio.schema.errors import ErrorCode

from fencepost.cluster.controller.isr import TopicIdPartition
from fencepost.coordinator.controller.active import Decide
from fencepost.coordinator.zookeeper import znodes
from fencepost.coordinator.zookeeper.errors import NotOurFormatError
from fencepost.coordinator.zookeeper.loading import batched
from fencepost.coordinator.zookeeper.session import ZkSession
from fencepost.coordinator.zookeeper.watches import Changed
from fencepost.protocol.schema import Entity

_log = structlog.get_logger(__name__)

AT_ONCE: Final = 200
"""The maximum number of partitions in one decision; other tasks run between two decisions."""


async def read_log_dir_events(session: ZkSession, names: Sequence[str]) -> set[int]:
    """Return the brokers that notifications name; log and skip unreadable ones."""
    brokers = set()
    for name in names:
        path = f"{znodes.LOG_DIR_EVENTS}/{name}"
        note = await session.get(path)
        try:
            if note is not None:
                brokers.add(znodes.log_dir_event_of(path, note.data))
        except NotOurFormatError as error:
            _log.error("log directory notification skipped", cause=str(error))
    return brokers


class LogDirs:
    """The offline replicas of all brokers.

    ``on_change`` is called when there are changes on which :meth:`decide_on_replicas` must decide.
    """

    def __init__(self, decide: Decide, on_change: Changed) -> None:
        self._decide, self._on_change = decide, on_change
        self._lost: dict[int, set[TopicIdPartition]] = {}
        """Offline replicas, by broker."""
        self._news: dict[int, dict[TopicIdPartition, bool]] = {}
        """Undecided changes, by broker and replica: True if the replica went offline."""

    def record_answer(self, broker_id: int, answer: Entity) -> None:
        """Record the errors of replicas in a LeaderAndIsr response."""
        lost = self._lost.setdefault(broker_id, set())
        for topic in answer.topics:
            for part in topic.partition_errors:
                key = topic.topic_id, part.partition_index
                is_lost = part.error_code == ErrorCode.kafka_storage_error
                if is_lost != (key in lost) and (is_lost or not part.error_code):
                    self._news.setdefault(broker_id, {})[key] = is_lost
                    (lost.add if is_lost else lost.discard)(key)
        if self._news:
            self._on_change()

    def forget(self, broker_id: int) -> None:
        """Treat a newly registered broker's replicas as online, unless it reports otherwise."""
        for place in self._lost.pop(broker_id, set()):
            self._news.setdefault(broker_id, {})[place] = False
        if self._news:
            self._on_change()

    async def decide_on_replicas(self) -> None:
        """Decide on the recorded changes."""
        news, self._news = self._news, {}
        for broker_id, places in news.items():
            for batch in batched([*places], AT_ONCE):
                lost = [partition for partition in batch if places[partition]]
                recovered = [partition for partition in batch if not places[partition]]
                self._decide(methodcaller("record_lost_replicas", broker_id, lost, recovered))
                await asyncio.sleep(0)
