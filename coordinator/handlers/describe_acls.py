"""DescribeAcls (29): who may do what. Nobody looks after that here.

The answer is that of an Apache Kafka without an authorizer: SECURITY_DISABLED, to which tools say
that rights can not be managed. An empty list would say that they can.

Source: ``AclApis.handleDescribeAcls``; KIP-140.
"""

from __future__ import annotations

from typing import Final

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.wire import ApiKey, Entity

NO_AUTHORIZER: Final = "No Authorizer is configured."


@handles(ApiKey.DESCRIBE_ACLS, versions=(1, 3), permission="DESCRIBE Cluster")
def run(ctx: Context) -> Entity:
    """Say that there are none, and will be none."""
    return ctx.respond.error(ErrorCode.security_disabled, NO_AUTHORIZER)
