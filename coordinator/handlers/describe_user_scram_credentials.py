"""DescribeUserScramCredentials (50): which users have a password. None has.

Source: ``ScramImage.describe``; KIP-554.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.coordinator.wire.steps import Steps


@handles(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, versions=(0, 0), permission="DESCRIBE Cluster")
def run(ctx: Context) -> Steps[Entity]:
    """Answer each user that was asked for once, with RESOURCE_NOT_FOUND."""
    make = ctx.respond
    times: dict[str, int] = {}
    for user in ctx.body.users or ():
        times[user.name] = times.get(user.name, 0) + 1
        yield
    results = []
    for name, count in times.items():
        code, message = ErrorCode.resource_not_found, "a user without SCRAM credentials"
        if count > 1:
            code, message = ErrorCode.duplicate_resource, "a user who is asked for twice"
        results.append(
            make.DescribeUserScramCredentialsResult(
                user=name, error_code=code, error_message=message, credential_infos=()
            )
        )
        yield
    return make.DescribeUserScramCredentialsResponse(
        error_code=ErrorCode.none, error_message=None, results=tuple(results)
    )
