"""Builders and readers of requests that both commands and pipelines send.

A partition is a pair (topic, index). The requests identify topics by name; for APIs whose newer
versions use topic ids, :data:`NAMED` has the last version with names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from fencepost.protocol.messages import RequestFactory
from fencepost.protocol.schema import Builder, Entity

Partition = tuple[str, int]

LATEST, EARLIEST = -1, -2
"""Special timestamps of :func:`list_offsets`."""

NAMED = {"Fetch": 12, "Produce": 12, "OffsetCommit": 9, "OffsetFetch": 9, "TxnOffsetCommit": 5}


def topics(
    structure: Builder, rows: Iterable[tuple[Partition, Any]], field: str = "partitions"
) -> list[Entity]:
    """Build one ``structure`` per topic, with the topic's ``rows`` in ``field``."""
    rows_by_topic: dict[str, list[Any]] = {}
    for (name, _), row in rows:
        rows_by_topic.setdefault(name, []).append(row)
    return [
        structure(name=name, **{field: partitions}) for name, partitions in rows_by_topic.items()
    ]


def rows_of(answer: Entity) -> Iterator[tuple[Partition, Entity]]:
    """Yield each partition of a response that is grouped by topic, with its row."""
    for topic in answer.topics:
        for row in topic.partitions:
            yield (topic.name, row.partition_index), row


def fetch_one(
    make: RequestFactory,
    partition: Partition,
    offset: int,
    *,
    isolation_level: int,
    max_wait_ms: int,
    max_bytes: int,
) -> Entity:
    """Build a Fetch of one partition without a fetch session.

    The broker responds as soon as one byte is available. ``max_bytes`` limits both the partition
    and the response (a first batch is returned whole).
    """
    topic, index = partition
    entry = make.FetchPartition(partition=index, fetch_offset=offset, partition_max_bytes=max_bytes)
    return make.message(
        max_wait_ms=max_wait_ms,
        min_bytes=1,
        max_bytes=max_bytes,
        isolation_level=isolation_level,
        topics=[make.FetchTopic(topic=topic, partitions=[entry])],
    )


def list_offsets(
    make: RequestFactory,
    timestamps: Mapping[Partition, int],
    *,
    isolation_level: int,
    timeout_ms: int,
) -> Entity:
    """Build a ListOffsets from a timestamp in ms, or LATEST or EARLIEST, by partition."""
    entries = (
        (place, make.ListOffsetsPartition(partition_index=place[1], timestamp=timestamp))
        for place, timestamp in timestamps.items()
    )
    return make.message(
        replica_id=-1,
        isolation_level=isolation_level,
        timeout_ms=timeout_ms,
        topics=topics(make.ListOffsetsTopic, entries),
    )


def offset_fetch(
    make: RequestFactory,
    group: str,
    partitions: Collection[Partition] | None,
    *,
    require_stable: bool,
) -> Entity:
    """Build an OffsetFetch of one group by a client that is not a member of it.

    None stands for all partitions with an offset. :func:`of_group` reads the response.
    """

    def named(structure: Builder) -> list[Entity] | None:
        if partitions is None:
            return None
        return topics(structure, ((place, place[1]) for place in partitions), "partition_indexes")

    # Up to version 7 the body names one group, from version 8 on it has a list of groups.
    entry = make.OffsetFetchRequestGroup(
        group_id=group, topics=named(make.OffsetFetchRequestTopics)
    )
    return make.message(
        group_id=group,
        topics=named(make.OffsetFetchRequestTopic),
        groups=(entry,),
        require_stable=require_stable,
    )


def of_group(answer: Entity) -> Entity:
    """Return the part of an OffsetFetch response about its only group."""
    return answer.groups[0] if hasattr(answer, "groups") else answer


def produce(
    make: RequestFactory,
    batches: Mapping[Partition, bytes],
    *,
    timeout_ms: int,
    transactional_id: str | None,
) -> Entity:
    """Build a Produce of one batch per partition with acks=all."""
    entries = (
        (place, make.PartitionProduceData(index=place[1], records=batch))
        for place, batch in batches.items()
    )
    return make.message(
        transactional_id=transactional_id,
        acks=-1,
        timeout_ms=timeout_ms,
        topic_data=topics(make.TopicProduceData, entries, "partition_data"),
    )


def add_partitions(make: RequestFactory, partitions: Iterable[Partition], **claim: Any) -> Entity:
    """Build an AddPartitionsToTxn of a version for clients: up to 3.

    ``claim`` are transactional_id, producer_id and producer_epoch. :func:`added` reads the
    response.
    """
    entries = ((place, place[1]) for place in sorted(partitions))
    return make.message(
        **{f"v3_and_below_{name}": value for name, value in claim.items()},
        v3_and_below_topics=topics(make.AddPartitionsToTxnTopic, entries),
    )


def added(answer: Entity) -> list[int]:
    """Return the error codes of an AddPartitionsToTxn response, including 0."""
    return [
        row.partition_error_code
        for topic in answer.results_by_topic_v3_and_below
        for row in topic.results_by_partition
    ]


def txn_offset_commit(
    make: RequestFactory, offsets: Mapping[Partition, int], *, metadata: str = "", **claim: Any
) -> Entity:
    """Build a TxnOffsetCommit of offsets by partition, all with the same metadata.

    ``claim`` are the identifying fields: transactional_id, group_id, producer_id, producer_epoch,
    and for a member of the group generation_id, member_id and group_instance_id.
    """
    row = make.TxnOffsetCommitRequestPartition
    entries = (
        (place, row(partition_index=place[1], committed_offset=offset, committed_metadata=metadata))
        for place, offset in offsets.items()
    )
    return make.message(**claim, topics=topics(make.TxnOffsetCommitRequestTopic, entries))
