"""AlterPartition requests, which carry ISR changes from local leaders to the controller.

One request is in flight at a time. It carries all changes submitted so far, and is retried until
the controller answers it (``cluster/alter_partition.py``).

Source: ``DefaultAlterPartitionManager``.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from functools import partial
from uuid import UUID

import structlog
from kio.schema.errors import ErrorCode

from fencepost.cluster.alter_partition import AlterPartitionRequest, AlterPartitions
from fencepost.cluster.errors import Errors
from fencepost.cluster.isr import AlteredPartition, IsrChange
from fencepost.coordinator.replication.controller_channel import ControllerChannel
from fencepost.coordinator.replication.controller_connection import NewestVersionRequest
from fencepost.coordinator.runtime.background import call_later, swallow
from fencepost.coordinator.storage.replica_manager import ReplicaManager
from fencepost.logcore.clock import Clock
from fencepost.protocol.api import ApiKey
from fencepost.protocol.messages import RequestFactory
from fencepost.protocol.schema import Entity

_log = structlog.get_logger(__name__)


class IsrChanges:
    """Sends the ISR changes of ``replicas`` to the controller; bound to the running loop."""

    def __init__(self, replicas: ReplicaManager, channel: ControllerChannel, clock: Clock) -> None:
        self._replicas, self._channel, self._clock = replicas, channel, clock
        self._queue = AlterPartitions(replicas.view)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_armed = False
        replicas.alter_partition = self.submit

    def __len__(self) -> int:
        """Return the number of unanswered changes."""
        return len(self._queue)

    def submit(self, change: IsrChange) -> None:
        """Add a change to the next request."""
        if not self._queue.submit(change):
            # An earlier change of this partition is still unanswered.
            refuse = partial(self._report_answer, change, int(Errors.OPERATION_NOT_ATTEMPTED))
            self._loop.call_soon(refuse)
        elif not self._is_armed:
            # Other changes of this turn of the loop go into the same request.
            self._is_armed = True
            self._loop.call_soon(self._send)

    def close(self) -> None:
        """Send no further changes."""
        self._replicas.alter_partition = None
        if self._timer is not None:
            self._timer.cancel()

    def _send(self) -> None:
        self._is_armed = False
        now_ms = self._clock.monotonic_ms()
        request = self._queue.next_request(now_ms)
        if request is not None:
            sent = self._channel.send(
                NewestVersionRequest(ApiKey.ALTER_PARTITION, partial(_entity, request))
            )
            sent.add_done_callback(self._answered)
        elif self._queue.in_flight is None and self._queue.retry_at_ms is not None:
            pause_ms = max(1, self._queue.retry_at_ms - now_ms)
            self._timer = call_later(self._loop, pause_ms, "ISR changes", self._send)

    def _answered(self, sent: asyncio.Future[Entity]) -> None:
        error, answers = int(Errors.NETWORK_EXCEPTION), {}
        if sent.cancelled():
            return
        failure = sent.exception()
        if failure is not None:
            _log.warning("AlterPartition failed", cause=f"{type(failure).__name__}: {failure}")
        else:
            error, answers = int(sent.result().error_code), _answers(sent.result())
            if error:
                _log.warning("AlterPartition refused", error=ErrorCode(error).name)
        for change, answer in self._queue.on_answer(error, answers, self._clock.monotonic_ms()):
            self._report_answer(change, answer)
        self._send()

    def _report_answer(self, change: IsrChange, answer: int | AlteredPartition) -> None:
        with swallow("ISR change", partition=f"{change.topic}-{change.index}"):
            self._replicas.alter_partition_answered(change, answer)


def _entity(request: AlterPartitionRequest, make: RequestFactory) -> Entity:
    topics: dict[UUID, list[Entity]] = defaultdict(list)
    for change in request.changes:
        part = make.PartitionData(
            partition_index=change.index,
            leader_epoch=change.leader_epoch,
            new_isr=tuple(member for member, _ in change.new_isr),
            new_isr_with_epochs=tuple(
                make.BrokerState(broker_id=member, broker_epoch=epoch)
                for member, epoch in change.new_isr
            ),
            leader_recovery_state=change.leader_recovery_state,
            partition_epoch=change.partition_epoch,
        )
        topics[change.topic_id].append(part)
    return make.AlterPartitionRequest(
        broker_id=request.broker_id,
        broker_epoch=request.broker_epoch,
        topics=tuple(
            make.TopicData(topic_id=topic_id, partitions=tuple(parts))
            for topic_id, parts in topics.items()
        ),
    )


def _answers(response: Entity) -> dict[tuple[UUID, int], int | AlteredPartition]:
    return {
        (topic.topic_id, part.partition_index): int(part.error_code)
        or AlteredPartition(part.leader_epoch, part.partition_epoch, tuple(part.isr))
        for topic in response.topics
        for part in topic.partitions
    }
