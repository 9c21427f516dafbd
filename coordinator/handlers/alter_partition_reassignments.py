"""AlterPartitionReassignments (45): reassign partitions to other brokers, or cancel reassignments.

Version 1 can forbid a change of the replication factor (KIP-860).

Source: ``ReplicationControlManager.alterPartitionReassignments``; KIP-455.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain, repeat
from typing import Any, Final

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.cluster.controller.machine import Controller
from fencepost.cluster.controller.reassignments import ReassignablePartition
from fencepost.coordinator.errors import InvalidRequestError
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import code_and_message, each_row
from fencepost.coordinator.handlers.controller_decisions import MAX_ITEMS, batched, decided_each
from fencepost.coordinator.runtime.turns import Work
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps

PARTITIONS_PER_TURN: Final = 100
"""The number of partitions that the controller decides on in one turn of the event loop. A decision
and its record take up to 0.1 ms. As in Kafka, a request is not atomic: some of its partitions may
be reassigned and others refused."""


def refused(ctx: Context, code: int, message: str | None) -> Steps[Entity]:
    """Refuse each partition for the same reason."""
    topics = yield from _topics(ctx, repeat((code, message)))
    return ctx.respond.AlterPartitionReassignmentsResponse(
        error_code=code, error_message=message, responses=topics
    )


def _topics(ctx: Context, outcomes: Iterator[tuple[int, str | None]]) -> Steps[tuple[Entity, ...]]:
    def row(part: Any) -> Entity:
        code, message = next(outcomes)
        return ctx.respond.ReassignablePartitionResponse(
            partition_index=part.partition_index, error_code=code, error_message=message
        )

    topics = []
    for topic in ctx.body.topics:
        parts = yield from each_row(topic.partitions, row)
        topics.append(ctx.respond.ReassignableTopicResponse(name=topic.name, partitions=parts))
    return tuple(topics)


@handles(
    ApiKey.ALTER_PARTITION_REASSIGNMENTS,
    versions=(0, 1),
    permission="ALTER Cluster",
    refused=refused,
)
def run(ctx: Context) -> Work[Entity]:
    """Respond with the result of each partition."""
    ctx.require_on_cluster(Operation.ALTER)
    body = ctx.body
    may_change_factor = getattr(body, "allow_replication_factor_change", True)
    if sum(len(topic.partitions) for topic in body.topics) > MAX_ITEMS:
        raise InvalidRequestError(f"one request may name at most {MAX_ITEMS} partitions")
    items = [
        ReassignablePartition(
            topic.name,
            part.partition_index,
            None if part.replicas is None else tuple(part.replicas),
        )
        for topic in body.topics
        for part in topic.partitions
    ]
    errors = yield from decided_each(
        ctx,
        (
            partial(
                Controller.alter_partition_reassignments,
                items=batch,
                allow_replication_factor_change=may_change_factor,
            )
            for batch in batched(items, PARTITIONS_PER_TURN)
        ),
    )
    topics = yield from _topics(ctx, map(code_and_message, chain.from_iterable(errors)))
    return ctx.respond.AlterPartitionReassignmentsResponse(
        allow_replication_factor_change=may_change_factor,
        error_code=ErrorCode.none,
        error_message=None,
        responses=topics,
    )
