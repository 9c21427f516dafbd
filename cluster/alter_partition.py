"""Queues a broker's ISR changes for the controller; at most one AlterPartition is in flight.

Source: ``DefaultAlterPartitionManager``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from uuid import UUID

from fencepost.cluster.errors import Errors
from fencepost.cluster.isr import AlteredPartition, IsrChange, ReplicationView
from fencepost.logcore.values import dataclass

RETRY_MS: Final = 50
"""The pause after an answer with a top-level error."""


@dataclass(frozen=True, slots=True)
class AlterPartitionRequest:
    """An AlterPartition request, with this broker's epoch at the time of the request."""

    broker_id: int
    broker_epoch: int
    changes: tuple[IsrChange, ...]


class AlterPartitions:
    """The queue of ISR changes of one broker."""

    def __init__(self, view: ReplicationView) -> None:
        self._view = view
        self._unanswered: dict[tuple[UUID, int], IsrChange] = {}
        """Changes that have not been answered, including those in flight."""
        self.in_flight: AlterPartitionRequest | None = None
        self.retry_at_ms: int | None = None
        """When to send again after a top-level error."""

    def submit(self, change: IsrChange) -> bool:
        """Queue a change; return False if an earlier change of the partition is unanswered.

        The partition's leader treats False as OPERATION_NOT_ATTEMPTED.
        """
        return self._unanswered.setdefault((change.topic_id, change.index), change) is change

    def next_request(self, now_ms: int) -> AlterPartitionRequest | None:
        """Return the request to send now and mark it as in flight; None if none may be sent."""
        if self.in_flight is not None or not self._unanswered:
            return None
        if self.retry_at_ms is not None and now_ms < self.retry_at_ms:
            return None
        self.retry_at_ms = None
        view = self._view
        self.in_flight = AlterPartitionRequest(
            view.broker_id, view.broker_epoch, tuple(self._unanswered.values())
        )
        return self.in_flight

    def on_answer(
        self,
        error: int,
        partitions: Mapping[tuple[UUID, int], int | AlteredPartition],
        now_ms: int,
    ) -> tuple[tuple[IsrChange, int | AlteredPartition], ...]:
        """Return each answered change with its answer, to pass to the partition's leader.

        Answered changes leave the queue first, so that leaders may submit further changes while
        they handle the answers. A partition that the answer omits is sent again. After a top-level
        error, such as STALE_BROKER_EPOCH or a lost connection (NETWORK_EXCEPTION), all partitions
        are sent again after ``RETRY_MS``. The channel to the controller handles NOT_CONTROLLER.
        """
        request, self.in_flight = self.in_flight, None
        if request is None:
            return ()
        if error != Errors.NONE:
            self.retry_at_ms = now_ms + RETRY_MS
            return ()
        answers = []
        for change in request.changes:
            key = change.topic_id, change.index
            answer = partitions.get(key)
            if answer is not None:
                self._unanswered.pop(key, None)
                answers.append((change, answer))
        return tuple(answers)

    def __len__(self) -> int:
        return len(self._unanswered)
