"""The transaction markers of one request: append them, then report their error codes.

The codes are final when the markers are committed. The sender, a transaction coordinator, handles
few errors and fails on all others, so only the codes in :data:`ANSWERS` are sent
(``TransactionMarkerRequestCompletionHandler``).

Source: ``KafkaApis.handleWriteTxnMarkersRequest``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kio.schema.errors import ErrorCode

from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.runtime.background import call_later
from fencepost.coordinator.runtime.commits import PendingRecords
from fencepost.coordinator.runtime.errors import ShardError
from fencepost.coordinator.storage.storage import Storage
from fencepost.logcore.machine import DomainError, EndMarker
from fencepost.logcore.tracebacks import without_traceback
from fencepost.txn.commands import TopicPartition

ANSWERS: Final = frozenset(
    {
        ErrorCode.none,
        ErrorCode.invalid_producer_epoch,
        ErrorCode.transaction_coordinator_fenced,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.not_leader_or_follower,
        ErrorCode.not_enough_replicas,
        ErrorCode.not_enough_replicas_after_append,
        ErrorCode.request_timed_out,
        ErrorCode.kafka_storage_error,
    }
)

WriteOne = Callable[[TopicPartition, EndMarker], bool]
"""``MarkerWriter.write_one``."""


def _code_of(error: DomainError) -> ErrorCode:
    if isinstance(error, ShardError):
        return ErrorCode.not_leader_or_follower
    code = error_code(error)
    return code if code in ANSWERS else ErrorCode.kafka_storage_error


class MarkerAppends:
    """The markers of one request; ``codes`` holds the error codes by producer id and partition."""

    def __init__(self, storage: Storage, write_one: WriteOne) -> None:
        self._logs, self._commits = storage.logs, storage.commits
        self._write_one = write_one
        self._timeout_ms = storage.config.int("request.timeout.ms")
        self._held: list[tuple[int, TopicPartition, PendingRecords]] = []
        self._is_late = False
        self.codes: dict[int, dict[TopicPartition, ErrorCode]] = {}

    def write(self, marker: EndMarker, partition: TopicPartition) -> DomainError | None:
        """Append one marker and record its error code; return the error of the append, or None."""
        producer_id = marker.stamp.producer_id
        codes = self.codes.setdefault(producer_id, {})
        if producer_id < 0 or marker.stamp.producer_epoch < 0:
            codes[partition] = ErrorCode.invalid_request
            return None
        try:
            written = self._write_one(partition, marker)
        except DomainError as error:
            codes[partition] = _code_of(error)
            return without_traceback(error)
        if written:
            self.appended(marker, partition)
        else:
            codes[partition] = ErrorCode.unknown_topic_or_partition
        return None

    def appended(self, marker: EndMarker, partition: TopicPartition) -> None:
        """Record that a marker was appended."""
        producer_id = marker.stamp.producer_id
        self.codes.setdefault(producer_id, {})[partition] = ErrorCode.none
        log = self._logs.find_open(partition)
        if log is not None:
            self._held.append((producer_id, partition, PendingRecords.of(log)))

    @property
    def waits_for_replicas(self) -> bool:
        """Return whether any marker must be replicated by other brokers."""
        return any(held.partition.marks.is_replicated for _, _, held in self._held)

    def committed(self) -> asyncio.Future[None] | None:
        """Return a future for the commit of all markers, or None if they are committed.

        The future is also done on failure or timeout. Call :meth:`settle` afterwards.
        """
        if self._commits.is_idle:
            return None
        done = self._commits.committed(dict.fromkeys(held.partition for _, _, held in self._held))
        if done is not None and self.waits_for_replicas:
            waited: asyncio.Future[None] = done

            def give_up() -> None:
                if not waited.done():
                    self._is_late = True
                    waited.set_result(None)

            loop = asyncio.get_running_loop()
            timer = call_later(loop, self._timeout_ms, "markers", give_up)
            done.add_done_callback(lambda _: timer.cancel())
        return done

    def settle(self) -> None:
        """Set the error codes of markers that were appended but not committed."""
        for producer_id, partition, held in self._held:
            if held.is_committed:
                continue
            if held.partition.offline is not None:
                code = ErrorCode.kafka_storage_error
            elif self._is_late and held.partition.marks.leader_epoch == held.leader_epoch:
                code = ErrorCode.request_timed_out
            else:
                code = ErrorCode.not_leader_or_follower
            self.codes[producer_id][partition] = code
