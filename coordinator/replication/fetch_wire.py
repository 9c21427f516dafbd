"""Encoding and decoding of a follower's Fetch and ListOffsets.

Source: ``RemoteLeaderEndPoint``, ``MetadataVersion.fetchRequestVersion``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from uuid import UUID

from fencepost.client.requests import rows_of, topics
from fencepost.cluster.fetcher import FetchRequest, FetchResponse
from fencepost.cluster.follower import (
    ListOffsetsRequest,
    PartitionFollower,
    PartitionResponse,
)
from fencepost.logcore.values import dataclass
from fencepost.protocol.api import ApiKey
from fencepost.protocol.messages import request_factory
from fencepost.protocol.schema import Entity

Key = tuple[UUID, int]
"""A partition: topic id and index."""

OffsetLookup = tuple[PartitionFollower, ListOffsetsRequest]

_FETCH: Final = ((27, 18), (21, 17), (19, 16), (10, 15), (9, 14), (0, 13))
_LIST_OFFSETS: Final = ((29, 11), (25, 10), (21, 9), (9, 8), (0, 7))
"""Pairs of a ``metadata.version`` level and the request version from that level on."""


def fetch_version(level: int) -> int:
    """Return the Fetch version that replicas use at a level of ``metadata.version``."""
    return next(version for lowest, version in _FETCH if level >= lowest)


def list_offsets_version(level: int) -> int:
    """Return the ListOffsets version that replicas use at a level of ``metadata.version``."""
    return next(version for lowest, version in _LIST_OFFSETS if level >= lowest)


@dataclass(frozen=True, slots=True)
class FetchSizes:
    """The size limits and the wait time of a follower's Fetch (``replica.fetch.*``)."""

    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    partition_max_bytes: int


def fetch_entity(
    request: FetchRequest, level: int, sizes: FetchSizes, *, broker_id: int, broker_epoch: int
) -> Entity:
    """Return the Fetch request that a Kafka follower sends."""
    make = request_factory(ApiKey.FETCH, fetch_version(level))
    topics: dict[UUID, list[Entity]] = {}
    for partition in request.partitions:
        topics.setdefault(partition.topic_id, []).append(
            make.FetchPartition(
                partition=partition.index,
                current_leader_epoch=partition.current_leader_epoch,
                fetch_offset=partition.fetch_offset,
                last_fetched_epoch=partition.last_fetched_epoch,
                log_start_offset=partition.log_start_offset,
                partition_max_bytes=sizes.partition_max_bytes,
            )
        )
    forgotten: dict[UUID, list[int]] = {}
    for topic_id, index in request.forgotten:
        forgotten.setdefault(topic_id, []).append(index)
    return make.message(
        replica_id=broker_id,
        replica_state=make.ReplicaState(replica_id=broker_id, replica_epoch=broker_epoch),
        max_wait_ms=sizes.max_wait_ms,
        min_bytes=sizes.min_bytes,
        max_bytes=sizes.max_bytes,
        isolation_level=0,
        session_id=request.session_id,
        session_epoch=request.session_epoch,
        topics=[
            make.FetchTopic(topic_id=topic_id, partitions=partitions)
            for topic_id, partitions in topics.items()
        ],
        forgotten_topics_data=[
            make.ForgottenTopic(topic_id=topic_id, partitions=indexes)
            for topic_id, indexes in forgotten.items()
        ],
        rack_id="",
    )


def fetch_answer(entity: Entity) -> FetchResponse:
    """Return the contents of a Fetch response, without copying the records."""
    partitions: dict[Key, PartitionResponse] = {}
    for topic in entity.responses:
        for row in topic.partitions:
            epoch = row.diverging_epoch
            diverging = None
            if epoch is not None and epoch.end_offset >= 0:
                diverging = epoch.epoch, epoch.end_offset
            partitions[topic.topic_id, row.partition_index] = PartitionResponse(
                error=int(row.error_code),
                high_watermark=row.high_watermark,
                log_start_offset=row.log_start_offset,
                diverging=diverging,
                records=row.records,
                size=len(row.records or b""),
            )
    return FetchResponse(int(entity.error_code), entity.session_id, partitions)


def list_offsets_entity(
    lookups: Iterable[OffsetLookup], level: int, *, broker_id: int, timeout_ms: int
) -> Entity:
    """Return a ListOffsets request for start or end offsets of the leader's logs."""
    make = request_factory(ApiKey.LIST_OFFSETS, list_offsets_version(level))
    rows = (
        (
            (follower.topic, follower.index),
            make.ListOffsetsPartition(
                partition_index=follower.index,
                current_leader_epoch=question.current_leader_epoch,
                timestamp=question.end.value,
            ),
        )
        for follower, question in lookups
    )
    return make.message(
        replica_id=broker_id,
        isolation_level=0,
        timeout_ms=timeout_ms,
        topics=topics(make.ListOffsetsTopic, rows),
    )


def listed_offsets(
    entity: Entity, lookups: Sequence[OffsetLookup]
) -> Mapping[Key, tuple[int, int]]:
    """Return (offset, error code) for each partition of ``lookups`` in the response."""
    rows = {place: (row.offset, int(row.error_code)) for place, row in rows_of(entity)}
    return {
        follower.key: rows[follower.topic, follower.index]
        for follower, _ in lookups
        if (follower.topic, follower.index) in rows
    }
