"""The errors of a log. Their wire numbers are in ``coordinator/error_codes.py``."""

from __future__ import annotations

from fencepost.logcore.machine import DomainError


class LogError(DomainError):
    """Base of all errors that a log raises."""


class CorruptRecordError(LogError):
    """A batch's CRC, length or magic is wrong (CORRUPT_MESSAGE)."""


class InvalidRecordError(LogError):
    """A batch is well formed but breaks a rule of the append path (INVALID_RECORD).

    ``record_errors`` holds (index in the batch, reason) of each invalid record.
    """

    def __init__(self, message: str, record_errors: tuple[tuple[int, str], ...] = ()) -> None:
        super().__init__(message)
        self.record_errors = record_errors


class NotOneBatchError(InvalidRecordError):
    """The data for a partition is not exactly one batch of format 2 (INVALID_RECORD)."""


class InvalidTimestampError(LogError):
    """A record's timestamp lies outside the topic's bounds (INVALID_TIMESTAMP).

    ``record_errors`` as in :class:`InvalidRecordError`.
    """

    def __init__(self, message: str, record_errors: tuple[tuple[int, str], ...] = ()) -> None:
        super().__init__(message)
        self.record_errors = record_errors


class RecordTooLargeError(LogError):
    """A batch is larger than ``max.message.bytes`` (MESSAGE_TOO_LARGE)."""


class RecordListTooLargeError(LogError):
    """A record set is larger than ``segment.bytes`` (RECORD_LIST_TOO_LARGE)."""


class UnsupportedCompressionError(LogError):
    """The codec is unknown, or not allowed at this request version."""


class OffsetOutOfRangeError(LogError):
    """The offset lies below the log start or above the log end (OFFSET_OUT_OF_RANGE)."""


class OutOfOrderSequenceError(LogError):
    """A producer's sequence does not continue its last one (OUT_OF_ORDER_SEQUENCE_NUMBER)."""


class TooManyProducersError(LogError):
    """The limit of remembered producers is reached; clients retry (NOT_ENOUGH_REPLICAS).

    No Kafka error has this meaning; all kinds of clients retry after NOT_ENOUGH_REPLICAS.
    """


class InvalidProducerEpochError(LogError):
    """A producer epoch is older than the partition's (INVALID_PRODUCER_EPOCH)."""


class TransactionCoordinatorFencedError(LogError):
    """A marker comes from a replaced coordinator (TRANSACTION_COORDINATOR_FENCED)."""


class InvalidTxnStateError(LogError):
    """A batch does not fit the producer's transaction on this partition (INVALID_TXN_STATE)."""


class UnexpectedAppendOffsetError(LogError):
    """A leader's batch begins before the log end; only followers see this error, never clients."""


class FencedLeaderEpochError(LogError):
    """The request's leader epoch is older than the partition's (FENCED_LEADER_EPOCH)."""


class UnknownLeaderEpochError(LogError):
    """The request's leader epoch is newer than the partition's (UNKNOWN_LEADER_EPOCH)."""


class StorageError(LogError):
    """The file system failed under a partition, which is off line until restart."""


class NoSpaceError(StorageError):
    """The disk is full or too many files are open: the call had no effect, and may be repeated."""
