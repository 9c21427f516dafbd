"""Fetch (1): read from many partitions, immediately or once enough bytes exist (``fetches.py``).

Version 4 adds isolation levels, version 5 log start offsets, version 7 sessions (KIP-227), version
9 leader epochs, version 11 racks (KIP-392), version 12 the epoch of the last fetched record,
version 13 topic ids, version 15 the followers' broker epochs, version 16 the current leader
(KIP-951).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.cluster.errors import NotLeaderOrFollowerError
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.errors import (
    InvalidRequestError,
    NotAReplicaError,
    TopicAuthorizationError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from fencepost.coordinator.handlers import Context, handles, replica_id_of, request_ms
from fencepost.coordinator.handlers.leader_hints import endpoints, leader_hint
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.storage.fetch_sessions import (
    FINAL_EPOCH,
    NO_REPLICA,
    NO_SESSION,
    CachedPartition,
    FetchedPartition,
)
from fencepost.coordinator.storage.fetches import Fetch
from fencepost.logcore.errors import FencedLeaderEpochError, StorageError
from fencepost.logcore.machine import DomainError
from fencepost.logcore.tracebacks import without_traceback
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps

FIRST_WITH_RACK = 11
FIRST_BY_ID = 13
FIRST_WITH_LEADER = 16
LAST_WITHOUT_STORAGE_ERROR = 5


@handles(ApiKey.FETCH, versions=(4, 18), permission="READ Topic")
def run(ctx: Context) -> Work[Entity]:
    """Respond with the records read; refuse every partition if the request itself is invalid."""
    body = ctx.body
    by_id = ctx.version >= FIRST_BY_ID
    state = getattr(body, "replica_state", None)
    replica_id = replica_id_of(body)
    has_rack = ctx.version >= FIRST_WITH_RACK
    throttle = ctx.throttle
    fetch = Fetch(
        requested=_requested_partitions(ctx),
        forgotten=(
            (topic.topic_id if by_id else topic.topic, index)
            for topic in getattr(body, "forgotten_topics_data", ())
            for index in topic.partitions
        ),
        by_topic_id=by_id,
        session_id=getattr(body, "session_id", NO_SESSION),
        session_epoch=getattr(body, "session_epoch", FINAL_EPOCH),
        isolation_level=getattr(body, "isolation_level", 0),
        replica_id=replica_id,
        broker_epoch=-1 if state is None else state.replica_epoch,
        rack=body.rack_id if has_rack else None,
        listener=ctx.connection.session.listener,
        # Even after a window without a Fetch, a response with more bytes would exceed the quota.
        max_bytes=body.max_bytes if throttle is None else min(body.max_bytes, throttle.most_bytes),
        min_bytes=body.min_bytes,
        max_wait_ms=request_ms(body.max_wait),
        may_read=None if ctx.broker.authorizer is None else _rights(ctx, follows=replica_id >= 0),
        may_send=None if throttle is None else throttle.may_fetch,
    )
    if body.topics and replica_id < 0:
        _observe(ctx, fetch.isolation_level, by_id=by_id)
    try:
        fetched = yield from ctx.broker.fetches.run(fetch)
    except InvalidRequestError as error:
        # Error responses of versions with topic ids name no partitions, as in Kafka.
        refused = without_traceback(error)
        refusals = (
            FetchedPartition(partition, error=refused)
            for partition in _requested_partitions(ctx)
            if not by_id
        )
        return (yield from _answer(ctx, fetch.session_id, refusals, error_code(error)))
    return (yield from _answer(ctx, fetched.session_id, fetched.partitions))


def _observe(ctx: Context, isolation_level: int, *, by_id: bool) -> None:
    """Observe the isolation level of a consumer, for each topic that it may read."""
    observations = ctx.broker.observations
    if observations is None:
        return

    def readable(topic: Any) -> str | None:
        metadata = ctx.broker.metadata
        image = metadata.topic_by_id(topic) if by_id else metadata.topic(topic)
        if image is None:
            return None
        may_read = ctx.may(Operation.READ, ResourceType.TOPIC, image.name, audited=False)
        return image.name if may_read else None

    topics = [topic.topic_id if by_id else topic.topic for topic in ctx.body.topics]
    observations.fetched(ctx.client_id, ctx.peer_host, isolation_level, topics, readable)


def _rights(ctx: Context, *, follows: bool) -> Callable[[str | None], bool]:
    """Return a function that tells whether the client may read a topic (None: unknown id).

    Any consumer may learn that an id is unknown; a follower needs CLUSTER_ACTION for every topic.
    """
    if follows:
        may_follow = ctx.may_on_cluster(Operation.CLUSTER_ACTION)
        return lambda _: may_follow
    return lambda name: name is None or ctx.may(Operation.READ, ResourceType.TOPIC, name)


def _requested_partitions(ctx: Context) -> Iterator[CachedPartition]:
    by_id = ctx.version >= FIRST_BY_ID
    for topic in ctx.body.topics:
        for part in topic.partitions:
            yield CachedPartition(
                (topic.topic_id if by_id else topic.topic, part.partition),
                part.fetch_offset,
                part.partition_max_bytes,
                getattr(part, "current_leader_epoch", -1),
                getattr(part, "last_fetched_epoch", -1),
                getattr(part, "log_start_offset", -1),
            )


def _answer(
    ctx: Context,
    session_id: int,
    fetched: Iterable[FetchedPartition],
    code: ErrorCode = ErrorCode.none,
) -> Steps[Entity]:
    make = ctx.respond
    leaders: set[int] = set()
    topics: list[Entity] = []
    for key, group in groupby(fetched, key=lambda partition: partition.requested.key[0]):
        parts: list[Entity] = []
        for partition in group:
            if topics or parts:
                yield
            parts.append((yield from _partition(ctx, partition, leaders)))
        name: dict[str, Any] = {"topic": key} if isinstance(key, str) else {"topic_id": key}
        topics.append(make.FetchableTopicResponse(**name, partitions=tuple(parts)))
    # Followers get no node endpoints, since they know them (``KafkaApis.handleFetchRequest``).
    is_client = replica_id_of(ctx.body) < 0
    return make.FetchResponse(
        error_code=code,
        session_id=session_id,
        responses=tuple(topics),
        **(endpoints(ctx, leaders) if leaders and is_client else {}),
    )


def _partition(ctx: Context, partition: FetchedPartition, leaders: set[int]) -> Steps[Entity]:
    make, read = ctx.respond, partition.read
    aborted: list[Entity] | None = None
    if read.aborted is not None:
        aborted = []
        for producer_id, first in read.aborted:
            aborted.append(make.AbortedTransaction(producer_id=producer_id, first_offset=first))
            yield
    more: dict[str, Entity] = {}
    if partition.diverging is not None:
        epoch, end_offset = partition.diverging
        more["diverging_epoch"] = make.EpochEndOffset(epoch=epoch, end_offset=end_offset)
    elif isinstance(partition.error, _WITHOUT_A_LOG):
        aborted = []
    elif isinstance(partition.error, _LED_ELSEWHERE) and ctx.version >= FIRST_WITH_LEADER:
        name = ctx.broker.fetches.topic_name(partition.requested.key)
        more = leader_hint(ctx, name, partition.requested.key[1], leaders)
    elif partition.preferred_replica != NO_REPLICA:
        more["preferred_read_replica"] = partition.preferred_replica
    return make.PartitionData(
        partition_index=partition.requested.key[1],
        error_code=ErrorCode.none if partition.error is None else _code(ctx, partition.error),
        high_watermark=read.high_watermark,
        last_stable_offset=read.last_stable_offset,
        log_start_offset=read.log_start_offset,
        aborted_transactions=aborted,
        records=read.records,
        **more,
    )


_LED_ELSEWHERE = (FencedLeaderEpochError, NotAReplicaError, NotLeaderOrFollowerError)
"""For these errors the response contains the current leader."""

_WITHOUT_A_LOG = (
    InvalidRequestError,
    TopicAuthorizationError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
"""For these errors, which occur before a log is read, the list of aborted transactions is empty, as
in Kafka. For other errors it is null."""


def _code(ctx: Context, error: DomainError) -> ErrorCode:
    if isinstance(error, StorageError) and ctx.version <= LAST_WITHOUT_STORAGE_ERROR:
        return ErrorCode.not_leader_or_follower
    return error_code(error)
