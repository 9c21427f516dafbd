"""Which partitions still need the end marker of which transaction.

This is soft state: a reload starts every prepared transaction afresh with all of its partitions,
which is right because writing a marker again is harmless.

Source: ``TransactionMarkerChannelManager``, minus the sending, which is the runtime's.
"""

from __future__ import annotations

from dataclasses import field

from fencepost.logcore.machine import InvariantViolation
from fencepost.logcore.values import dataclass
from fencepost.txn.commands import MarkersWritten, TopicPartition, WriteMarkers


@dataclass(slots=True)
class _Completion:
    request: WriteMarkers
    missing: set[TopicPartition] = field(default_factory=set)


class MarkerTable:
    """The transactions whose markers are being written, by transactional id.

    An id in here is what Kafka calls *pending*: its outcome is decided, and requests for it have
    to wait. There is at most one completion per id, and ``transaction_number`` tells the answers
    of this one from those of its predecessors, which under TV1 bear the same identity.
    """

    def __init__(self) -> None:
        self._completions: dict[str, _Completion] = {}

    def __contains__(self, transactional_id: object) -> bool:
        return transactional_id in self._completions

    def expect(self, request: WriteMarkers) -> None:
        """Remember that the markers of ``request`` are to be written."""
        if request.transactional_id in self._completions:
            raise InvariantViolation(f"{request.transactional_id} is being completed already")
        self._completions[request.transactional_id] = _Completion(request, set(request.partitions))

    def settle(self, answer: MarkersWritten) -> bool:
        """Take note of ``answer``; True when it was the last one awaited.

        An answer to another completion, or a repeated one, changes nothing.
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
        """The requests that are being carried out."""
        return tuple(completion.request for completion in self._completions.values())

    def clear(self) -> None:
        """Forget everything: the shard stops serving."""
        self._completions.clear()


def _answers(answer: MarkersWritten, request: WriteMarkers) -> bool:
    return (
        answer.transaction_number == request.transaction_number
        and answer.producer_id == request.stamp.producer_id
        and answer.producer_epoch == request.stamp.producer_epoch
    )
