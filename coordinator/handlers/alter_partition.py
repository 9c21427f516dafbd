"""AlterPartition (56): change the ISR on behalf of partition leaders (KIP-497, KIP-903).

Version 2 has no broker epochs, so no epoch of a replica in the new ISR is checked.

Source: ``ReplicationControlManager.alterPartition``.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.cluster.controller.isr import ProposedIsr
from fencepost.cluster.image import PartitionRegistration
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.broker_registration import ZERO
from fencepost.coordinator.handlers.controller_decisions import MAX_ITEMS, decided
from fencepost.coordinator.runtime.turns import Work
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity

ANY_EPOCH = -1


@handles(ApiKey.ALTER_PARTITION, versions=(2, 3), permission="CLUSTER_ACTION Cluster")
def run(ctx: Context) -> Work[Entity]:
    """Respond with the result of each partition."""
    ctx.require_on_cluster(Operation.CLUSTER_ACTION)
    body, make = ctx.body, ctx.respond
    items = [
        ProposedIsr(
            topic_id=topic.topic_id or ZERO,
            index=part.partition_index,
            leader_epoch=part.leader_epoch,
            partition_epoch=part.partition_epoch,
            new_isr=_isr(part),
            leader_recovery_state=part.leader_recovery_state,
        )
        for topic in body.topics
        for part in topic.partitions
    ]
    if len(items) > MAX_ITEMS:
        return make.error(ErrorCode.invalid_request)
    answers = iter(
        (
            yield from decided(
                ctx,
                lambda controller: controller.alter_partition(
                    body.broker_id, body.broker_epoch, items
                ),
            )
        )
    )
    topics = []
    for topic in body.topics:
        parts = []
        for part in topic.partitions:
            parts.append(_answer(ctx, part.partition_index, next(answers)))
            yield None
        topics.append(make.TopicData(topic_id=topic.topic_id, partitions=tuple(parts)))
    return make.AlterPartitionResponse(error_code=ErrorCode.none, topics=tuple(topics))


def _isr(part: Any) -> tuple[tuple[int, int], ...]:
    if hasattr(part, "new_isr"):
        return tuple((broker_id, ANY_EPOCH) for broker_id in part.new_isr)
    return tuple((member.broker_id, member.broker_epoch) for member in part.new_isr_with_epochs)


def _answer(ctx: Context, index: int, state: PartitionRegistration | DomainError) -> Entity:
    make = ctx.respond
    if isinstance(state, DomainError):
        return make.PartitionData(
            partition_index=index,
            error_code=error_code(state),
            leader_id=0,
            leader_epoch=0,
            isr=(),
            partition_epoch=0,
        )
    return make.PartitionData(
        partition_index=index,
        error_code=ErrorCode.none,
        leader_id=state.leader,
        leader_epoch=state.leader_epoch,
        isr=state.isr,
        leader_recovery_state=state.leader_recovery_state,
        partition_epoch=state.partition_epoch,
    )
