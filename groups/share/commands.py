"""Inputs of a share partition, its effects, and their results.

Source: the ShareFetch and ShareAcknowledge schemas, ``ShareFetchUtils`` and ``Persister`` of Kafka.
"""

from __future__ import annotations

from enum import Enum, IntEnum, StrEnum
from typing import Final, NamedTuple

from fencepost.groups.share.batches import StateBatch
from fencepost.groups.share.states import Cause, RecordState
from fencepost.logcore.values import dataclass

LATEST_TIMESTAMP: Final = -1
EARLIEST_TIMESTAMP: Final = -2
"""The timestamps by which ListOffsets asks for the end and the start of a log."""


class SharePartitionKey(NamedTuple):
    """The identity of a share partition."""

    group_id: str
    topic_id: bytes
    partition: int


class AcquireMode(IntEnum):
    """``ShareAcquireMode`` of a ShareFetch (KIP-1206)."""

    BATCH_OPTIMIZED = 0
    RECORD_LIMIT = 1


class IsolationLevel(Enum):
    """``share.isolation.level`` of a group."""

    READ_UNCOMMITTED = "read_uncommitted"
    READ_COMMITTED = "read_committed"


class OffsetReset(StrEnum):
    """The kind of ``share.auto.offset.reset``."""

    LATEST = "latest"
    EARLIEST = "earliest"
    BY_DURATION = "by_duration"


@dataclass(frozen=True, slots=True)
class ShareSettings:
    """The ``group.share.*`` configuration of the broker, or of a group that has its own.

    A share partition reads it at each use, so that a change applies to the next acquisition.
    """

    record_lock_duration_ms: int = 30_000
    """``share.record.lock.duration.ms``: the time that a member has to acknowledge a record."""
    delivery_count_limit: int = 5
    """``share.delivery.count.limit``: the maximum number of deliveries of one record."""
    max_record_locks: int = 2_000
    """``share.partition.max.record.locks``: the maximum number of offsets between the start offset
    and the end offset."""
    renew_acknowledge_enabled: bool = True
    """``share.renew.acknowledge.enable`` (KIP-1222)."""
    isolation_level: IsolationLevel = IsolationLevel.READ_UNCOMMITTED
    auto_offset_reset: OffsetReset = OffsetReset.LATEST
    reset_duration_ms: int = 0
    """The duration of ``by_duration``."""
    dead_letter_queue: bool = False
    """Whether share.version is at least 2 and ``errors.deadletterqueue.topic.name`` is set."""


# --- fetching ------------------------------------------------------------------------------------


class FetchedBatch(NamedTuple):
    """The header of a batch that was read from the log."""

    first: int
    last: int
    producer_id: int = -1
    is_transactional: bool = False
    is_abort_marker: bool = False


class AbortedTransaction(NamedTuple):
    """An aborted transaction among the fetched records, as in a Fetch response."""

    producer_id: int
    first_offset: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """Records that were read for a member at ``fetch_offset``, up to the isolation level's bound.

    ``batches`` must not be empty.
    """

    fetch_offset: int
    batches: tuple[FetchedBatch, ...]
    aborted: tuple[AbortedTransaction, ...] = ()


@dataclass(frozen=True, slots=True)
class AcquireRequest:
    """The acquisition that a ShareFetch asks for, from one share partition."""

    member_id: str
    max_records: int
    """``MaxRecords`` less the offsets acquired from the request's other partitions."""
    batch_size: int
    mode: AcquireMode = AcquireMode.BATCH_OPTIMIZED


class AcquiredRange(NamedTuple):
    """An entry of ``AcquiredRecords`` in a ShareFetch response."""

    first: int
    last: int
    delivery_count: int

    @property
    def size(self) -> int:
        """The number of offsets."""
        return self.last - self.first + 1


# --- acknowledging -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AcknowledgeBatch:
    """An entry of ``AcknowledgementBatches``: one type for the range, or one for each offset."""

    first: int
    last: int
    types: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The new state of the acknowledged offsets is written, if any had to be; the error is NONE."""


@dataclass(frozen=True, slots=True)
class Initialized:
    """The share partition is active: fetches that waited for it may continue."""


# --- effects, and their results ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadState:
    """Read the state from the share coordinator, then call ``SharePartition.state_read``."""

    key: SharePartitionKey
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class StateRead:
    """The result of ReadState."""

    state_epoch: int
    start_offset: int
    batches: tuple[StateBatch, ...]


@dataclass(frozen=True, slots=True)
class LookUpStartOffset:
    """Look up the offset of a timestamp, then call ``SharePartition.start_offset_found``.

    ``timestamp`` has the same meaning as in ListOffsets with read_uncommitted. If it is later than
    the last record's timestamp, the result is the log end offset.
    """

    key: SharePartitionKey
    timestamp: int


@dataclass(frozen=True, slots=True)
class WriteState:
    """Write state to the share coordinator, then call ``SharePartition.state_written``."""

    key: SharePartitionKey
    write_id: int
    state_epoch: int
    leader_epoch: int
    start_offset: int
    delivery_complete_count: int
    batches: tuple[StateBatch, ...]


@dataclass(frozen=True, slots=True)
class SendToDeadLetterQueue:
    """Produce records to the dead-letter queue, and call ``dead_lettered`` with the result.

    The results may be reported in several calls. The records are archived even if producing them
    has failed.
    """

    key: SharePartitionKey
    first: int
    last: int
    delivery_count: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class WakeFetches:
    """Try the waiting fetches of the share partition again: records or room became available."""

    key: SharePartitionKey


@dataclass(frozen=True, slots=True)
class DropPartition:
    """Remove the fenced share partition; fetches that wait for it get NOT_LEADER_OR_FOLLOWER."""

    key: SharePartitionKey


# --- inspection ----------------------------------------------------------------------------------


class InFlightRange(NamedTuple):
    """In-flight offsets with one state, for ``groups describe``, ``groups blame`` and tests."""

    first: int
    last: int
    state: RecordState
    delivery_count: int
    member_id: str | None
    deadline_ms: int | None
    is_in_transition: bool
