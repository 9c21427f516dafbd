"""DescribeProducers (61): list a partition's producers and their open transactions.

Source: ``ReplicaManager.activeProducerState``, KIP-664.
"""

from __future__ import annotations

from collections.abc import Collection

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.errors import TopicAuthorizationError
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.rights import named_topics, refused_topics
from fencepost.coordinator.metadata.names import check_name
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps


@handles(ApiKey.DESCRIBE_PRODUCERS, versions=(0, 0), permission="READ Topic")
def run(ctx: Context) -> Steps[Entity]:
    """List the producers of every distinct requested partition."""
    make = ctx.respond
    topics = []
    seen: set[tuple[str, int]] = set()
    requested = ctx.body.topics
    refused = yield from refused_topics(ctx, Operation.READ, named_topics(requested))
    for topic in requested:
        parts = []
        for index in topic.partition_indexes:
            if (topic.name, index) not in seen:
                seen.add((topic.name, index))
                part = yield from _partition(ctx, topic.name, index, refused)
                parts.append(part)
            yield
        topics.append(make.TopicResponse(name=topic.name, partitions=tuple(parts)))
    return make.DescribeProducersResponse(topics=tuple(topics))


def _partition(ctx: Context, topic: str, index: int, refused: Collection[str]) -> Steps[Entity]:
    make = ctx.respond
    code, message = ErrorCode.none, None
    active: list[Entity] = []
    try:
        if ctx.broker.metadata.topic(topic) is None:
            check_name(topic)
        if topic in refused:
            raise TopicAuthorizationError(f"the client may not read {topic}")
        for producer in ctx.broker.replicas.readable(topic, index).producers.view():
            active.append(
                make.ProducerState(
                    producer_id=producer.producer_id,
                    producer_epoch=producer.producer_epoch,
                    last_sequence=producer.last_sequence,
                    last_timestamp=producer.last_timestamp,
                    coordinator_epoch=producer.coordinator_epoch,
                    current_txn_start_offset=producer.current_txn_first_offset,
                )
            )
            yield
    except DomainError as error:
        code, message = error_code(error), str(error)
    return make.PartitionResponse(
        partition_index=index,
        error_code=code,
        error_message=message,
        active_producers=tuple(active),
    )
