"""Evidence of a transaction's outcome that any Kafka broker stores.

The coordinator's log, ``__transaction_state``, has the last record of each transactional id, and
earlier records until the log is compacted. A partition's log has the end marker of each transaction
after the transaction's batches, for as long as the log has these batches, even if the transactional
id has expired.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from kio.schema.errors import ErrorCode

from fencepost.client.client import ApiError
from fencepost.client.queries.reader import headers
from fencepost.client.requests import EARLIEST, LATEST, Partition
from fencepost.coordinator.metadata.names import TRANSACTION_STATE
from fencepost.coordinator.runtime.key_partition import partition_for
from fencepost.logcore.batch import BatchHeader, ControlType, first_control, record_chunks
from fencepost.logcore.errors import LogError
from fencepost.logcore.machine import Record
from fencepost.txn.epochs import ProducerIdentity
from fencepost.txn.records import decode, encode_key
from fencepost.txn.state import TransactionMetadata

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession

MAX_STATE_RECORDS = 10_000
"""The maximum number of records kept for one transactional id; the oldest ones are dropped."""

_REFUSED = frozenset(
    {
        ErrorCode.topic_authorization_failed,
        ErrorCode.cluster_authorization_failed,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.unsupported_version,
    }
)


class StateRecord(NamedTuple):
    """A record of ``__transaction_state``; ``txn`` is None for a tombstone, written at expiry."""

    offset: int
    timestamp_ms: int
    txn: TransactionMetadata | None


class StateLog(NamedTuple):
    """The records of one transactional id, oldest first; ``unreadable`` says why there are none."""

    partition: int
    records: tuple[StateRecord, ...] = ()
    unreadable: str | None = None


class EndMarker(NamedTuple):
    """An end marker of a producer in a partition's log.

    ``first_offset`` is the offset of the transaction's first batch, if that batch has the requested
    epoch; None if no such batch is left or was read. A ``first_sequence`` of 0 shows that this
    batch is the first one of its epoch in the partition.
    """

    place: Partition
    offset: int
    producer_epoch: int
    coordinator_epoch: int
    commit: bool
    timestamp_ms: int
    first_offset: int | None
    first_sequence: int | None


def state_logs(session: ClusterSession, names: Iterable[str]) -> dict[str, StateLog]:
    """Read the records of transactional ids from the coordinators' log, each partition once.

    The log can be unreadable: the topic may not exist, or the principal may not read it.
    """
    missing = set(names)
    try:
        (topic,) = session.topics([TRANSACTION_STATE])
    except ApiError as error:
        if error.code not in _REFUSED:
            raise
        return dict.fromkeys(missing, StateLog(-1, unreadable=str(error)))
    by_partition: dict[int, list[str]] = defaultdict(list)
    for name in sorted(missing):
        by_partition[partition_for(name, len(topic.partitions))].append(name)
    logs_by_id: dict[str, StateLog] = {}
    for index, logs in by_partition.items():
        try:
            records = _records_of(session, index, logs)
        except LogError as error:
            logs_by_id |= dict.fromkeys(logs, StateLog(index, unreadable=str(error)))
        except ApiError as error:
            if error.code not in _REFUSED:
                raise
            logs_by_id |= dict.fromkeys(logs, StateLog(index, unreadable=str(error)))
        else:
            logs_by_id |= {name: StateLog(index, tuple(records[name])) for name in logs}
    return logs_by_id


def _records_of(
    session: ClusterSession, index: int, names: Iterable[str]
) -> dict[str, deque[StateRecord]]:
    place, keys = (TRANSACTION_STATE, index), {encode_key(name): name for name in names}
    records = {name: deque[StateRecord](maxlen=MAX_STATE_RECORDS) for name in keys.values()}
    first = session.offsets([place], EARLIEST)[place]
    for data, at, header in _batches(session, place, first):
        if header.is_control:
            continue
        for record in (record for chunk in record_chunks(data, at, header) for record in chunk):
            name = keys.get(record.key or b"")
            if name is None:
                continue
            decoded = decode(Record(encode_key(name), record.value))
            if decoded is None:
                raise ApiError(
                    ErrorCode.unsupported_version,
                    "Fetch",
                    f"{place[0]}-{index} has a record of an unknown version at {record.offset}",
                )
            records[name].append(StateRecord(record.offset, record.timestamp_ms, decoded.txn))
    return records


def end_markers(
    session: ClusterSession, place: Partition, identity: ProducerIdentity, since_ms: int | None
) -> list[EndMarker]:
    """Return the end markers that end, or may end, transactions of ``identity`` in a partition.

    The partition is read from ``since_ms``, or from its beginning. Raises ApiError.
    """
    start = session.offsets([place], EARLIEST if since_ms is None else since_ms)[place]
    if start < 0:  # no record is as recent as that
        return []
    markers: list[EndMarker] = []
    first: BatchHeader | None = None
    for data, at, header in _batches(session, place, start):
        if header.producer_id != identity.producer_id or not header.is_transactional:
            continue
        if not header.is_control:
            is_same_epoch = header.producer_epoch == identity.epoch
            first = (header if first is None else first) if is_same_epoch else None
            continue
        # In every transaction version, the first marker after a batch ends the batch's transaction.
        # If the batch is gone, the marker may also end the previous or the next transaction.
        may_end = first is not None or header.producer_epoch - identity.epoch in {0, 1}
        marker = first_control(data, at, header) if may_end else None
        if marker is not None and marker.type in {ControlType.COMMIT, ControlType.ABORT}:
            markers.append(
                EndMarker(
                    place,
                    header.base_offset,
                    header.producer_epoch,
                    marker.coordinator_epoch,
                    marker.type is ControlType.COMMIT,
                    header.max_timestamp,
                    None if first is None else first.base_offset,
                    None if first is None else first.base_sequence,
                )
            )
        first = None
    return markers


def _batches(
    session: ClusterSession, place: Partition, start: int
) -> Iterator[tuple[bytes, int, BatchHeader]]:
    """Yield the batches of a partition up to its present high watermark, with their bytes."""
    end = session.offsets([place], LATEST)[place]
    position = start
    while position < end:
        data = session.fetch(*place, position, committed=False).records or b""
        before = position
        for at, header in headers(data):
            if header.next_offset > position:
                yield data, at, header
                position = header.next_offset
        if position == before:  # compaction has removed the rest
            return
