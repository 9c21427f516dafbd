"""ConsumerGroupDescribe (69): epochs, members and assignments of consumer-protocol groups.

Version 1 adds each member's type: classic or consumer protocol.
"""

from __future__ import annotations

from collections.abc import Iterator

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import result_of
from fencepost.coordinator.handlers.group_responses import (
    described_assignment,
    described_group,
    refused_group,
)
from fencepost.coordinator.handlers.rights import refused_topics
from fencepost.coordinator.runtime.turns import Work
from fencepost.groups.consumer_commands import (
    DescribeConsumerGroup,
    DescribeConsumerGroupResult,
    DescribedConsumer,
)
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity

CLASSIC, CONSUMER = 0, 1
"""The values of ``MemberType``: the protocol that a member uses."""


@handles(
    ApiKey.CONSUMER_GROUP_DESCRIBE, versions=(0, 1), permission="DESCRIBE Group, DESCRIBE Topic"
)
def run(ctx: Context) -> Work[Entity]:
    """Describe each distinct group; errors are reported per group."""
    groups = ctx.broker.groups
    serves = groups.serves_consumer_protocol
    refused, described = [], []
    for group_id in dict.fromkeys(ctx.body.group_ids):
        if not serves:
            described.append(refused_group(ctx, group_id, ErrorCode.unsupported_version))
        elif not ctx.may(Operation.DESCRIBE, ResourceType.GROUP, group_id):
            refused.append(refused_group(ctx, group_id, ErrorCode.group_authorization_failed))
        else:
            result = yield from result_of(groups.submit(group_id, DescribeConsumerGroup(group_id)))
            described.append((yield from _described(ctx, group_id, result)))
        yield None
    return ctx.respond.ConsumerGroupDescribeResponse(groups=(*refused, *described))


def _described(
    ctx: Context, group_id: str, result: DescribeConsumerGroupResult | DomainError
) -> Work[Entity]:
    if isinstance(result, DomainError):
        return refused_group(ctx, group_id, error_code(result), str(result))
    if (yield from refused_topics(ctx, Operation.DESCRIBE, _topics(result))):
        hidden = "the group has topics that the client may not describe"
        return refused_group(ctx, group_id, ErrorCode.topic_authorization_failed, hidden)
    return (yield from described_group(ctx, group_id, result, _member))


def _topics(result: DescribeConsumerGroupResult) -> Iterator[str]:
    """Yield the names of all topics in the members' current and target assignments."""
    for member in result.members:
        for topics in (member.assignment, member.target_assignment):
            yield from (topic.topic for topic in topics)


def _member(ctx: Context, member: DescribedConsumer) -> Entity:
    said = member.metadata
    return ctx.respond.Member(
        member_id=member.member_id,
        instance_id=said.instance_id,
        rack_id=said.rack_id,
        member_epoch=member.member_epoch,
        client_id=said.client_id,
        client_host=said.client_host,
        subscribed_topic_names=said.subscribed_topic_names,
        subscribed_topic_regex=said.subscribed_topic_regex or "",
        assignment=described_assignment(ctx, member.assignment),
        target_assignment=described_assignment(ctx, member.target_assignment),
        member_type=CONSUMER if said.classic is None else CLASSIC,
    )
