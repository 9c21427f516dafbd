"""The partitions that still need the end marker of a transaction.

This is soft state: after a reload, every prepared transaction starts again with all of its
partitions, because writing a marker twice is harmless.

Source: ``TransactionMarkerChannelManager``, without the sending, which the runtime does.
"""

from __future__ import annotations

from dataclasses import field

from fencepost.logcore.machine import InvariantViolation
from fencepost.logcore.values import dataclass
from fencepost.txn.commands import MarkersWritten, TopicPartition, WriteMarkers


@dataclass(slots=True)
class _PendingMarkers:
    request: WriteMarkers
    missing: set[TopicPartition] = field(default_factory=set)


class MarkerTable:
    """The transactions whose markers are being written, by transactional id.

    Kafka calls an id in this table *pending*: the outcome is decided, and requests for the id must
    wait. At most one transaction of an id is in the table. ``transaction_number`` distinguishes
    reports on that transaction from reports on an earlier one, which has the same identity under
    TV1.
    """

    def __init__(self) -> None:
        self._completions: dict[str, _PendingMarkers] = {}

    def __contains__(self, transactional_id: object) -> bool:
        return transactional_id in self._completions

    def expect(self, request: WriteMarkers) -> None:
        """Add the markers of ``request``. Raises InvariantViolation if the id is pending."""
        if request.transactional_id in self._completions:
            raise InvariantViolation(f"{request.transactional_id} is being completed already")
        self._completions[request.transactional_id] = _PendingMarkers(
            request, set(request.partitions)
        )

    def settle(self, answer: MarkersWritten) -> bool:
        """Apply a report; return whether every marker is now written.

        A repeated report, and a report on another transaction, change nothing.
        """
        completion = self._completions.get(answer.transactional_id)
        if completion is None or not _answers(answer, completion.request):
            return False
        if answer.partitions is None:
            completion.missing.clear()
        else:
            completion.missing.difference_update(answer.partitions)
        if completion.missing:
            return False
        del self._completions[answer.transactional_id]
        return True

    def requests(self) -> tuple[WriteMarkers, ...]:
        """Return the requests whose markers are being written."""
        return tuple(completion.request for completion in self._completions.values())

    def clear(self) -> None:
        """Remove everything, because the shard stops serving."""
        self._completions.clear()


def _answers(answer: MarkersWritten, request: WriteMarkers) -> bool:
    return (
        answer.transaction_number == request.transaction_number
        and answer.producer_id == request.stamp.producer_id
        and answer.producer_epoch == request.stamp.producer_epoch
    )
