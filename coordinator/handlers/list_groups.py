"""ListGroups (16): list this broker's groups. Version 4 filters by state, version 5 by type."""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.handlers import Context, handles
from fencepost.groups.commands import ListGroups, ListGroupsResult
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps


@handles(ApiKey.LIST_GROUPS, versions=(0, 5), permission="DESCRIBE Cluster or Group")
async def run(ctx: Context) -> Steps[Entity]:
    """List the groups that the client may describe; fail the request while a shard is loading."""
    body = ctx.body
    listed = await ctx.broker.groups.list_groups(
        ListGroups(
            states=tuple(getattr(body, "states_filter", ())),
            types=tuple(getattr(body, "types_filter", ())),
        )
    )
    return _answer(ctx, listed)


def _answer(ctx: Context, listed: ListGroupsResult) -> Steps[Entity]:
    respond = ctx.respond
    sees_all = ctx.may_on_cluster(Operation.DESCRIBE, audited=False)
    groups = []
    for group in listed.groups:
        if sees_all or ctx.may(
            Operation.DESCRIBE, ResourceType.GROUP, group.group_id, audited=False
        ):
            groups.append(
                respond.ListedGroup(
                    group_id=group.group_id,
                    protocol_type=group.protocol_type,
                    group_state=group.state,
                    group_type=group.group_type,
                )
            )
        yield
    return respond.ListGroupsResponse(error_code=ErrorCode.none, groups=tuple(groups))
