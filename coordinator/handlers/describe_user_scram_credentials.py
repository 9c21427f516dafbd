"""DescribeUserScramCredentials (50): list the SCRAM mechanisms and iterations of users.

Source: ``ScramImage.describe``; KIP-554.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.handlers import Context, handles
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps

_TWICE = "Cannot describe SCRAM credentials for the same user twice in a single request: "
_NOT_THERE = "Attempt to describe a user credential that does not exist: "


@handles(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, versions=(0, 0), permission="DESCRIBE Cluster")
def run(ctx: Context) -> Steps[Entity]:
    """Respond with each requested user once, or with all users."""
    make, users = ctx.respond, ctx.broker.users
    if not ctx.may_on_cluster(Operation.DESCRIBE):
        said = {
            "error_code": ErrorCode.cluster_authorization_failed,
            "error_message": "Cluster authorization failed.",
        }
        # One row without a user name for each requested user, as in Kafka's response.
        row = make.DescribeUserScramCredentialsResult(user="", credential_infos=(), **said)
        rows = (row,) * len(ctx.body.users or ())
        return make.DescribeUserScramCredentialsResponse(results=rows, **said)
    times: dict[str, int] = {}
    for user in ctx.body.users or ():
        times[user.name] = times.get(user.name, 0) + 1
        yield
    if not times:
        times = {name: 1 for name, _, _ in users.listed()}
    results = []
    for name, count in times.items():
        profiles = users.iterations(name)
        code, message = ErrorCode.none, None
        if count > 1:
            code, message, profiles = ErrorCode.duplicate_resource, _TWICE + name, []
        elif not profiles:
            code, message = ErrorCode.resource_not_found, _NOT_THERE + name
        infos = [
            make.CredentialInfo(mechanism=number, iterations=iterations)
            for number, iterations in profiles
        ]
        results.append(
            make.DescribeUserScramCredentialsResult(
                user=name, error_code=code, error_message=message, credential_infos=tuple(infos)
            )
        )
        yield
    return make.DescribeUserScramCredentialsResponse(
        error_code=ErrorCode.none, error_message=None, results=tuple(results)
    )
