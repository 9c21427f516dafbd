"""DeleteAcls (31): take rights away; refused as long as nobody looks after rights.

Source: ``AclApis.handleDeleteAcls``; KIP-140.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.describe_acls import NO_AUTHORIZER
from fencepost.coordinator.wire import ApiKey, Entity


@handles(ApiKey.DELETE_ACLS, versions=(1, 3), permission="ALTER Cluster")
def run(ctx: Context) -> Entity:
    """Refuse each filter."""
    make = ctx.respond
    refused = make.DeleteAclsFilterResult(
        error_code=ErrorCode.security_disabled, error_message=NO_AUTHORIZER, matching_acls=()
    )
    return make.DeleteAclsResponse(filter_results=(refused,) * len(ctx.body.filters))
