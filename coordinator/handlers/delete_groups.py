"""DeleteGroups (42): an administrator removes empty groups with all their offsets."""

from __future__ import annotations

from coordinator.handlers import Context, handles
from coordinator.handlers.answers import code_of, outcome
from coordinator.wire import ApiKey, Entity
from groups.commands import DeleteGroup
from logcore.machine import DomainError


@handles(ApiKey.DELETE_GROUPS, versions=(0, 2), permission="DELETE Group")
async def run(ctx: Context) -> Entity:
    """Delete each group; errors are told group by group."""
    submit, respond = ctx.broker.groups.submit, ctx.respond
    # A repeated name is one deletion, as in Kafka.
    names = dict.fromkeys(ctx.body.groups_names)
    asked = [(name, outcome(submit(name, DeleteGroup(name), ctx.origin))) for name in names]
    results = [(name, await answer) for name, answer in asked]
    return respond.DeleteGroupsResponse(
        results=tuple(
            respond.DeletableGroupResult(
                group_id=name,
                error_code=code_of(result if isinstance(result, DomainError) else None),
            )
            for name, result in results
        )
    )
