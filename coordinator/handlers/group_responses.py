"""The fields that responses about consumer groups and about share groups have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context, authorized
from fencepost.groups.consumer_commands import (
    ConsumerHeartbeatResult,
    DescribeConsumerGroupResult,
    NamedPartitions,
)
from fencepost.groups.share_commands import DescribeShareGroupResult, ShareHeartbeatResult
from fencepost.protocol import Entity
from fencepost.protocol.messages import ResponseFactory
from fencepost.protocol.steps import Steps

MAX_KEPT_ANSWERS: Final = 1_024
"""The maximum number of cached responses without an assignment, of 200 bytes each."""


def heartbeat_response(
    make: ResponseFactory, result: ConsumerHeartbeatResult | ShareHeartbeatResult
) -> Entity:
    """Build the response to a heartbeat, with the assignment if the coordinator returns one."""
    said = result.member_id, result.member_epoch, result.heartbeat_interval_ms
    if result.assignment is None:
        return _unchanged(make, *said)
    assignment = make.Assignment(
        topic_partitions=tuple(
            make.TopicPartitions(topic_id=UUID(bytes=topic_id), partitions=partitions)
            for topic_id, partitions in result.assignment
        )
    )
    return _heartbeat_response(make, *said, assignment)


def _heartbeat_response(
    make: ResponseFactory, member_id: str, epoch: int, interval_ms: int, assignment: Entity | None
) -> Entity:
    return make.message(
        error_code=ErrorCode.none,
        member_id=member_id,
        member_epoch=epoch,
        heartbeat_interval_ms=interval_ms,
        assignment=assignment,
    )


@lru_cache(maxsize=MAX_KEPT_ANSWERS)
def _unchanged(make: ResponseFactory, member_id: str, epoch: int, interval_ms: int) -> Entity:
    """Return the response without an assignment, which nearly every heartbeat gets; cached."""
    return _heartbeat_response(make, member_id, epoch, interval_ms, None)


def described_group(
    ctx: Context,
    group_id: str,
    result: DescribeConsumerGroupResult | DescribeShareGroupResult,
    describe_member: Callable[[Context, Any], Entity],
) -> Steps[Entity]:
    """Build the description of a group, one member per step."""
    members = []
    for member in result.members:
        members.append(describe_member(ctx, member))
        yield None
    return ctx.respond.DescribedGroup(
        error_code=ErrorCode.none,
        group_id=group_id,
        group_state=result.state,
        group_epoch=result.group_epoch,
        assignment_epoch=result.assignment_epoch,
        assignor_name=result.assignor_name,
        members=tuple(members),
        authorized_operations=(
            authorized.of_group(ctx, group_id)
            if ctx.body.include_authorized_operations
            else authorized.NOT_ASKED
        ),
    )


def described_assignment(ctx: Context, topics: Iterable[NamedPartitions]) -> Entity:
    """Build the assignment of a described member."""
    return ctx.respond.Assignment(
        topic_partitions=tuple(
            ctx.respond.TopicPartitions(
                topic_id=UUID(bytes=topic.topic_id),
                topic_name=topic.topic,
                partitions=topic.partitions,
            )
            for topic in topics
        )
    )


def refused_group(
    ctx: Context, group_id: str, code: ErrorCode, message: str | None = None
) -> Entity:
    """Build the entry of a group that is not described."""
    return ctx.respond.DescribedGroup(error_code=code, error_message=message, group_id=group_id)
