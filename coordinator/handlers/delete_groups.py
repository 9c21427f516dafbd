"""DeleteGroups (42): delete empty groups with all their offsets, or their share state.

Version 3 adds an error message. Only GROUP_DELETION_FAILED has one: it reports an error of a plugin
for streams groups, which Fencepost does not serve.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import code_of, result_of
from fencepost.coordinator.runtime.late_imports import SHARE_GROUP_MODULES, load
from fencepost.coordinator.runtime.turns import Work
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity


@handles(ApiKey.DELETE_GROUPS, versions=(0, 3), permission="DELETE Group")
def run(ctx: Context) -> Work[Entity]:
    """Delete each group; errors are reported per group."""
    yield from load(SHARE_GROUP_MODULES)
    delete, respond = ctx.broker.share_groups.delete_group, ctx.respond
    deletions, refused, results = [], [], []
    # A group that is named twice is deleted once, as in Kafka.
    for name in dict.fromkeys(ctx.body.groups_names):
        if ctx.may(Operation.DELETE, ResourceType.GROUP, name):
            deletions.append((name, delete(name, ctx.origin)))
        else:
            refused.append(name)
        yield None
    for name, future in deletions:
        result = yield from result_of(future)
        error = result if isinstance(result, DomainError) else None
        results.append(respond.DeletableGroupResult(group_id=name, error_code=code_of(error)))
        yield None
    for name in refused:
        code = ErrorCode.group_authorization_failed
        results.append(respond.DeletableGroupResult(group_id=name, error_code=code))
        yield None
    return respond.DeleteGroupsResponse(results=tuple(results))
