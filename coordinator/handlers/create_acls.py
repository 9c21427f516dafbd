"""CreateAcls (30): give somebody a right; refused as long as nobody looks after rights.

Source: ``AclApis.handleCreateAcls``; KIP-140.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.describe_acls import NO_AUTHORIZER
from fencepost.coordinator.wire import ApiKey, Entity


@handles(ApiKey.CREATE_ACLS, versions=(1, 3), permission="ALTER Cluster")
def run(ctx: Context) -> Entity:
    """Refuse each of them."""
    make = ctx.respond
    refused = make.AclCreationResult(
        error_code=ErrorCode.security_disabled, error_message=NO_AUTHORIZER
    )
    return make.CreateAclsResponse(results=(refused,) * len(ctx.body.creations))
