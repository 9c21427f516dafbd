"""AssignReplicasToDirs requests, which report each replica's log directory (KIP-858).

Fencepost has one log directory. If the storage of one replica fails, the broker assigns that
replica to the LOST directory, and the controller elects another leader for that partition alone.
Once a restarted broker can open the log, it assigns the replica to its directory again.

Source: ``AssignmentsManager``.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from functools import partial
from typing import Final
from uuid import UUID

import structlog
from kio.schema.errors import ErrorCode

from fencepost.cluster.image import LOST, UNASSIGNED, LocalPartition
from fencepost.coordinator.replication.controller_channel import ControllerChannel
from fencepost.coordinator.replication.controller_connection import NewestVersionRequest
from fencepost.coordinator.runtime.background import call_later
from fencepost.coordinator.storage.replica_manager import ReplicaManager
from fencepost.protocol.api import ApiKey
from fencepost.protocol.messages import RequestFactory
from fencepost.protocol.schema import Entity

MAX_ASSIGNMENTS: Final = 2_250
"""The maximum number of partitions in one request (kafka: ``MAX_ASSIGNMENTS_PER_REQUEST``)."""

RETRY_MS: Final = 500
"""The pause after a request that completed no assignment."""

_NOTHING_TO_DO: Final = frozenset(
    {
        ErrorCode.none,
        ErrorCode.unknown_topic_id,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.not_leader_or_follower,
    }
)
"""Error codes after which an assignment is not sent again: it succeeded, or this broker no longer
has the replica."""

Key = tuple[UUID, int]

_log = structlog.get_logger(__name__)


class Directories:
    """Assigns the replicas of ``replicas`` to ``directory_id``; bound to the running loop."""

    def __init__(
        self, replicas: ReplicaManager, channel: ControllerChannel, *, directory_id: UUID
    ) -> None:
        self._replicas, self._channel = replicas, channel
        self._directory_id = directory_id
        self._placements: dict[Key, UUID] = {}
        self._in_flight: dict[Key, UUID] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_armed = False
        replicas.on_placed = self.placed

    def __len__(self) -> int:
        """Return the number of assignments that the controller has not confirmed."""
        return len(self._placements)

    def placed(self, local: LocalPartition, *, is_offline: bool) -> None:
        """Queue a replica's directory (LOST if offline), unless the metadata already has it."""
        key = local.topic_id, local.index
        directory = LOST if is_offline else self._directory_id
        if directory in {local.registration.directory_of(self._replicas.node_id), UNASSIGNED}:
            self._placements.pop(key, None)
            return
        self._placements[key] = directory
        if not (self._is_armed or self._in_flight):
            self._is_armed = True
            self._loop.call_soon(self._send)

    def close(self) -> None:
        """Send no further assignments."""
        self._replicas.on_placed = None
        self._placements.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _send(self) -> None:
        self._is_armed = False
        if self._placements and not self._in_flight:
            self._in_flight = dict(list(self._placements.items())[:MAX_ASSIGNMENTS])
            request = NewestVersionRequest(
                ApiKey.ASSIGN_REPLICAS_TO_DIRS, partial(self._entity, self._in_flight)
            )
            self._channel.send(request).add_done_callback(self._answered)

    def _entity(self, assigned: dict[Key, UUID], make: RequestFactory) -> Entity:
        directories: dict[UUID, dict[UUID, list[int]]] = defaultdict(lambda: defaultdict(list))
        for (topic_id, index), directory in assigned.items():
            directories[directory][topic_id].append(index)
        view = self._replicas.view
        return make.AssignReplicasToDirsRequest(
            broker_id=view.broker_id,
            broker_epoch=view.broker_epoch,
            directories=tuple(
                make.DirectoryData(
                    id_=directory,
                    topics=tuple(
                        make.TopicData(
                            topic_id=topic_id,
                            partitions=tuple(
                                make.PartitionData(partition_index=index) for index in indexes
                            ),
                        )
                        for topic_id, indexes in topics.items()
                    ),
                )
                for directory, topics in directories.items()
            ),
        )

    def _answered(self, sent: asyncio.Future[Entity]) -> None:
        placements, self._in_flight = self._in_flight, {}
        if sent.cancelled():
            return
        failure = sent.exception()
        if failure is not None:
            cause = f"{type(failure).__name__}: {failure}"
            _log.warning("AssignReplicasToDirs failed", cause=cause)
        elif sent.result().error_code:
            error = ErrorCode(sent.result().error_code).name
            _log.warning("AssignReplicasToDirs refused", error=error)
        else:
            self._settle(placements, sent.result())
        if self._placements and self._replicas.on_placed is not None:
            done = any(key not in self._placements for key in placements)
            self._timer = call_later(self._loop, 0 if done else RETRY_MS, "directories", self._send)

    def _settle(self, placements: dict[Key, UUID], answer: Entity) -> None:
        for directory in answer.directories:
            for topic in directory.topics:
                for part in topic.partitions:
                    key = topic.topic_id, part.partition_index
                    is_over = part.error_code in _NOTHING_TO_DO
                    if is_over and self._placements.get(key) == placements.get(key):
                        self._placements.pop(key, None)
