"""Encoding and decoding of the metadata observer's Fetch and FetchSnapshot.

Source: ``KafkaRaftClient.buildFetchRequest``, ``RaftUtil``, ``VotersRecord``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from uuid import UUID

from kio.schema.voters_record.v0.data import VotersRecord
from kio.serial import entity_reader

from fencepost.cluster.observer import (
    FetchMetadata,
    FetchSnapshot,
    LeaderHint,
    MetadataBatch,
    MetadataFetched,
    OffsetAndEpoch,
    SnapshotFetched,
)
from fencepost.logcore.batch import (
    ControlType,
    decode_records,
    parse_control,
    parse_header,
    verify_crc,
)
from fencepost.logcore.errors import CorruptRecordError
from fencepost.protocol.messages import RequestFactory
from fencepost.protocol.schema import Entity

METADATA_TOPIC: Final = "__cluster_metadata"
METADATA_TOPIC_ID: Final = UUID(int=1)

MAX_WAIT_MS: Final = 500
"""How long a controller may hold a fetch that finds no new records."""

MAX_FETCH_BYTES: Final = 1 << 20
"""``controller.quorum.fetch.max.bytes``, and ``controller.quorum.fetch.snapshot.max.bytes``."""

FIRST_FETCH_BY_ID: Final = 13

_HEADER_BYTES: Final = 61


def fetch_body(
    request: FetchMetadata,
    make: RequestFactory,
    *,
    node_id: int,
    cluster_id: str,
    directory_id: UUID,
) -> Entity:
    """Return a Fetch of the metadata log, without a fetch session."""
    partition = make.FetchPartition(
        partition=0,
        current_leader_epoch=request.current_leader_epoch,
        fetch_offset=request.offset,
        last_fetched_epoch=request.last_fetched_epoch,
        log_start_offset=-1,
        partition_max_bytes=0,
        replica_directory_id=directory_id,
        high_watermark=request.high_watermark,
    )
    return make.message(
        cluster_id=cluster_id,
        replica_id=node_id,
        replica_state=make.ReplicaState(replica_id=node_id),
        max_wait_ms=MAX_WAIT_MS,
        min_bytes=0,
        max_bytes=MAX_FETCH_BYTES,
        session_id=0,
        session_epoch=-1,
        topics=[make.FetchTopic(topic_id=METADATA_TOPIC_ID, partitions=[partition])],
    )


def snapshot_body(
    request: FetchSnapshot, make: RequestFactory, *, node_id: int, cluster_id: str
) -> Entity:
    """Return a FetchSnapshot request for the next chunk of a snapshot."""
    partition = make.PartitionSnapshot(
        partition=0,
        current_leader_epoch=request.current_leader_epoch,
        snapshot_id=make.SnapshotId(
            end_offset=request.snapshot.offset, epoch=request.snapshot.epoch
        ),
        position=request.position,
    )
    return make.message(
        cluster_id=cluster_id,
        replica_id=node_id,
        max_bytes=MAX_FETCH_BYTES,
        topics=[make.TopicSnapshot(name=METADATA_TOPIC, partitions=[partition])],
    )


def fetched(answer: Entity) -> MetadataFetched:
    """Return the contents of a Fetch response for the metadata log."""
    row = _only_partition(answer.responses if not answer.error_code else ())
    if row is None:
        return MetadataFetched(error=int(answer.error_code) or -1)
    diverging, snapshot = row.diverging_epoch, row.snapshot_id
    return MetadataFetched(
        error=int(row.error_code),
        hint=_hint(row.current_leader, answer),
        high_watermark=row.high_watermark,
        diverging=(
            None
            if diverging.epoch < 0 and diverging.end_offset < 0
            else OffsetAndEpoch(diverging.end_offset, diverging.epoch)
        ),
        snapshot=(
            None if snapshot.end_offset < 0 else OffsetAndEpoch(snapshot.end_offset, snapshot.epoch)
        ),
        records=bytes(row.records or b""),
    )


def snapshot_fetched(answer: Entity) -> SnapshotFetched:
    """Return the contents of a FetchSnapshot response."""
    row = _only_partition(answer.topics if not answer.error_code else ())
    if row is None:
        return SnapshotFetched(error=int(answer.error_code) or -1)
    return SnapshotFetched(
        error=int(row.error_code),
        hint=_hint(row.current_leader, answer),
        size=row.size,
        position=row.position,
        chunk=bytes(row.unaligned_records or b""),
    )


def _only_partition(topics: Any) -> Entity | None:
    return next((row for topic in topics for row in topic.partitions), None)


def _hint(leader: Entity, answer: Entity) -> LeaderHint:
    return LeaderHint(
        leader.leader_id,
        leader.leader_epoch,
        {
            endpoint.node_id: (endpoint.host, endpoint.port)
            for endpoint in getattr(answer, "node_endpoints", ())
        },
    )


def batches_reader(listener: str) -> Callable[[bytes], Iterator[MetadataBatch]]:
    """Return a decoder of metadata batches that finds the voters' addresses on ``listener``."""

    def read(data: bytes) -> Iterator[MetadataBatch]:
        view, pos = memoryview(data), 0
        while len(view) - pos >= _HEADER_BYTES:
            header = parse_header(view, pos)
            if pos + header.size > len(view):
                return
            verify_crc(view, pos, header)
            records = decode_records(view, pos, header)
            voters: Mapping[int, tuple[str, int]] | None = None
            values: list[bytes] = []
            for record in records:
                if header.is_control:
                    if parse_control(record).type is ControlType.KRAFT_VOTERS:
                        voters = _voters(record.value or b"", listener)
                elif record.value is None:
                    raise CorruptRecordError(f"a metadata record at {record.offset} has no value")
                else:
                    values.append(record.value)
            yield MetadataBatch(
                header.base_offset, header.last_offset, header.leader_epoch, tuple(values), voters
            )
            pos += header.size

    return read


_read_voters = entity_reader(VotersRecord)


def _voters(value: bytes, listener: str) -> dict[int, tuple[str, int]]:
    record, _ = _read_voters(value, 0)
    return {
        voter.voter_id: (endpoint.host, endpoint.port)
        for voter in record.voters
        for endpoint in voter.endpoints
        if endpoint.name == listener
    }
