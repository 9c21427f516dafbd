"""ShareGroupDescribe (77): epochs, members and assignments of share groups (KIP-932)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

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
from fencepost.coordinator.runtime.errors import ShardError
from fencepost.coordinator.runtime.turns import Work
from fencepost.groups.share_commands import (
    DescribedShareMember,
    DescribeShareGroup,
    DescribeShareGroupResult,
)
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity

HIDDEN: Final = "The group has described topic(s) that the client is not authorized to describe."


@handles(ApiKey.SHARE_GROUP_DESCRIBE, versions=(1, 1), permission="DESCRIBE Group, DESCRIBE Topic")
def run(ctx: Context) -> Work[Entity]:
    """Describe each group, twice if it is named twice; errors are reported per group."""
    groups = ctx.broker.groups
    serves = groups.serves_share_groups
    refused, described = [], []
    for group_id in ctx.body.group_ids:
        if not serves:
            described.append(refused_group(ctx, group_id, ErrorCode.unsupported_version))
        elif not ctx.may(Operation.DESCRIBE, ResourceType.GROUP, group_id):
            refused.append(refused_group(ctx, group_id, ErrorCode.group_authorization_failed))
        elif not group_id:
            described.append(refused_group(ctx, group_id, ErrorCode.invalid_group_id))
        else:
            result = yield from result_of(groups.submit(group_id, DescribeShareGroup(group_id)))
            described.append((yield from _described(ctx, group_id, result)))
        yield None
    return ctx.respond.ShareGroupDescribeResponse(groups=(*refused, *described))


def _described(
    ctx: Context, group_id: str, result: DescribeShareGroupResult | DomainError
) -> Work[Entity]:
    if isinstance(result, DomainError):
        message = None if isinstance(result, ShardError) else str(result)
        return refused_group(ctx, group_id, error_code(result), message)
    if (yield from refused_topics(ctx, Operation.DESCRIBE, _topics(result))):
        return refused_group(ctx, group_id, ErrorCode.topic_authorization_failed, HIDDEN)
    return (yield from described_group(ctx, group_id, result, _member))


def _topics(result: DescribeShareGroupResult) -> Iterator[str]:
    """Yield the names of all topics in the members' assignments."""
    for member in result.members:
        yield from (topic.topic for topic in member.assignment)


def _member(ctx: Context, member: DescribedShareMember) -> Entity:
    said = member.metadata
    return ctx.respond.Member(
        member_id=member.member_id,
        rack_id=said.rack_id,
        member_epoch=member.member_epoch,
        client_id=said.client_id,
        client_host=said.client_host,
        subscribed_topic_names=said.subscribed_topic_names,
        assignment=described_assignment(ctx, member.assignment),
    )
