"""Changes of ISRs on their way to the controller: collected, one request at a time, until answered.

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
"""After an answer that says nothing of the partitions."""


@dataclass(frozen=True, slots=True)
class AlterPartitionRequest:
    """What is to be asked, with this broker's epoch of the moment at which it was built."""

    broker_id: int
    broker_epoch: int
    changes: tuple[IsrChange, ...]


class AlterPartitions:
    """The queue of one broker."""

    def __init__(self, view: ReplicationView) -> None:
        self._view = view
        self._unsent: dict[tuple[UUID, int], IsrChange] = {}
        """Not yet answered; what is in flight stays in it."""
        self.in_flight: AlterPartitionRequest | None = None
        self.retry_at_ms: int | None = None
        """When to ask again after an answer that failed as a whole."""

    def submit(self, change: IsrChange) -> bool:
        """Take a change; False where an earlier one of the partition has not been answered.

        That is OPERATION_NOT_ATTEMPTED to the partition's leader.
        """
        return self._unsent.setdefault((change.topic_id, change.index), change) is change

    def next_request(self, now_ms: int) -> AlterPartitionRequest | None:
        """What is to be sent now; it is in flight from then on, until it is answered."""
        if self.in_flight is not None or not self._unsent:
            return None
        if self.retry_at_ms is not None and now_ms < self.retry_at_ms:
            return None
        self.retry_at_ms = None
        view = self._view
        self.in_flight = AlterPartitionRequest(
            view.broker_id, view.broker_epoch, tuple(self._unsent.values())
        )
        return self.in_flight

    def answered(
        self,
        error: int,
        partitions: Mapping[tuple[UUID, int], int | AlteredPartition],
        now_ms: int,
    ) -> tuple[tuple[IsrChange, int | AlteredPartition], ...]:
        """What each partition's leader has to hear; they may submit anew while they do.

        A partition that the answer leaves out is asked for again. So is all of it, after
        ``RETRY_MS``, where the answer as a whole is an error: STALE_BROKER_EPOCH, a lost connection
        (NETWORK_EXCEPTION), or any other. NOT_CONTROLLER is the channel's to deal with.
        """
        request, self.in_flight = self.in_flight, None
        if request is None:
            return ()
        if error != Errors.NONE:
            self.retry_at_ms = now_ms + RETRY_MS
            return ()
        told = []
        for change in request.changes:
            key = change.topic_id, change.index
            answer = partitions.get(key)
            if answer is not None:
                self._unsent.pop(key, None)
                told.append((change, answer))
        return tuple(told)

    def __len__(self) -> int:
        return len(self._unsent)
