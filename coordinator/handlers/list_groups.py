"""ListGroups (16): the groups of this broker. Version 4 filters by state, 5 by type."""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.groups.commands import ListGroups


@handles(ApiKey.LIST_GROUPS, versions=(0, 5), permission="DESCRIBE Cluster or Group")
async def run(ctx: Context) -> Entity:
    """List; an error of a loading shard is the error of the whole."""
    body, respond = ctx.body, ctx.respond
    listed = await ctx.broker.groups.list_groups(
        ListGroups(
            states=tuple(getattr(body, "states_filter", ())),
            types=tuple(getattr(body, "types_filter", ())),
        )
    )
    return respond.ListGroupsResponse(
        error_code=ErrorCode.none,
        groups=tuple(
            respond.ListedGroup(
                group_id=group.group_id,
                protocol_type=group.protocol_type,
                group_state=group.state,
                group_type=group.group_type,
            )
            for group in listed.groups
        ),
    )
