"""DescribeTopicPartitions (75): describe topics in pages of bounded size (KIP-966).

Source: ``DescribeTopicPartitionsRequestHandler``.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.cluster.image import TopicImage
from fencepost.coordinator.errors import InvalidTopicError
from fencepost.coordinator.handlers import Context, authorized, handles
from fencepost.coordinator.handlers.answers import by_name
from fencepost.coordinator.handlers.endpoints import Endpoints
from fencepost.coordinator.handlers.rights import refused_topics
from fencepost.coordinator.metadata.names import check_name, is_internal
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps

MAX_PARTITIONS = 2_000
"""The maximum number of partitions in one page: Kafka's ``max.request.partition.size.limit``."""


NAMES_PER_STEP = 5_000
"""The number of names sorted in one turn of the event loop; sorting them takes some milliseconds.
"""


@handles(ApiKey.DESCRIBE_TOPIC_PARTITIONS, versions=(0, 0), permission="DESCRIBE Topic")
def run(ctx: Context) -> Steps[Entity]:
    """Describe topics in the order of their names, from the cursor until the page is full."""
    body, make, topics = ctx.body, ctx.respond, ctx.broker.metadata.topics
    requested = yield from by_name(body.topics)
    names = list(requested or topics)
    begin = None if body.cursor is None else (body.cursor.topic_name, body.cursor.partition_index)
    if begin is not None:
        if begin[1] < 0 or (requested and begin[0] not in requested):
            return _refused(ctx)
        names = [name for name in names if name >= begin[0]]
    room = max(1, min(body.response_partition_limit, MAX_PARTITIONS))
    described: list[Entity] = []
    cursor = None
    endpoints = Endpoints(ctx)
    hidden = yield from refused_topics(ctx, Operation.DESCRIBE, names, audited=bool(requested))
    for name in (yield from _sorted([name for name in names if name not in hidden])):
        yield
        first_index = 0 if begin is None or name != begin[0] else begin[1]
        if room <= 0:
            cursor = make.Cursor(topic_name=name, partition_index=0)
            break
        topic = topics.get(name)
        if topic is None:
            described.append(_unknown(ctx, name))
        else:
            end = min(len(topic.partitions), first_index + room)
            described.append(_described(ctx, topic, range(first_index, end), endpoints))
            room -= max(end - first_index, 0)
            if end < len(topic.partitions):
                cursor = make.Cursor(topic_name=name, partition_index=end)
                break
    for name in hidden if requested else ():
        described.append(
            make.DescribeTopicPartitionsResponseTopic(
                error_code=ErrorCode.topic_authorization_failed, name=name
            )
        )
        yield
    return make.DescribeTopicPartitionsResponse(topics=tuple(described), next_cursor=cursor)


def _sorted(names: list[str]) -> Steps[Iterator[str]]:
    """Return the names in order."""
    runs = []
    for at in range(0, len(names), NAMES_PER_STEP):
        runs.append(sorted(names[at : at + NAMES_PER_STEP]))
        yield
    return merge(*runs)


def _refused(ctx: Context) -> Entity:
    """Refuse an invalid cursor with an error per topic: the response has no top-level error."""
    make = ctx.respond
    return make.DescribeTopicPartitionsResponse(
        topics=tuple(
            make.DescribeTopicPartitionsResponseTopic(
                error_code=ErrorCode.invalid_request, name=topic.name
            )
            for topic in ctx.body.topics
        )
    )


def _unknown(ctx: Context, name: str) -> Entity:
    code = ErrorCode.unknown_topic_or_partition
    try:
        check_name(name)
    except InvalidTopicError:
        code = ErrorCode.invalid_topic_exception
    return ctx.respond.DescribeTopicPartitionsResponseTopic(
        error_code=code, name=name, topic_authorized_operations=authorized.of_topic(ctx, name)
    )


def _described(ctx: Context, topic: TopicImage, indexes: range, endpoints: Endpoints) -> Entity:
    make = ctx.respond.DescribeTopicPartitionsResponsePartition
    partitions = []
    for index in indexes:
        state, registration = endpoints.state(topic, index), topic.partitions[index]
        partitions.append(
            make(
                error_code=state.error,
                partition_index=index,
                leader_id=state.leader,
                leader_epoch=state.leader_epoch,
                replica_nodes=state.replicas,
                isr_nodes=state.isr,
                eligible_leader_replicas=registration.elr,
                last_known_elr=registration.last_known_elr,
                offline_replicas=state.offline,
            )
        )
    return ctx.respond.DescribeTopicPartitionsResponseTopic(
        error_code=ErrorCode.none,
        name=topic.name,
        topic_id=topic.topic_id,
        is_internal=is_internal(topic.name),
        partitions=tuple(partitions),
        topic_authorized_operations=authorized.of_topic(ctx, topic.name),
    )
