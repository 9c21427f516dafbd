"""ShareFetch (78): refuse share groups, which this broker does not serve, with a visible error.

A cluster of Kafka 4.3 has share groups. If one of its brokers coordinates a group, the group's
consumers send ShareFetch to the partition leaders. If a leader does not support the request, Java's
consumer retries silently forever; a partition error makes its ``poll`` fail.

No share session is stored: a client that continues one must start a new session
(SHARE_SESSION_NOT_FOUND), and then gets the errors of its partitions again.

Source: ``ShareConsumeRequestManager``, ``ShareFetchCollector.handleInitializeErrors``, KIP-932.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.handlers import Context, handles
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps

FIRST_EPOCH: Final = 0
LAST_EPOCH: Final = -1

_WHY: Final = "share groups are not served by this broker"


@handles(ApiKey.SHARE_FETCH, versions=(1, 2), permission="READ Group")
def run(ctx: Context) -> Steps[Entity]:
    """Refuse each partition of a new session with UNSUPPORTED_VERSION."""
    make, body = ctx.respond, ctx.body
    if not ctx.may(Operation.READ, ResourceType.GROUP, body.group_id or ""):
        return make.error(ErrorCode.group_authorization_failed)
    if body.share_session_epoch not in (FIRST_EPOCH, LAST_EPOCH):
        return make.error(ErrorCode.share_session_not_found)
    refused: dict[Any, dict[int, Entity]] = {}
    for topic in body.topics:
        parts = refused.setdefault(topic.topic_id, {})
        for part in topic.partitions:
            parts[part.partition_index] = make.PartitionData(
                partition_index=part.partition_index,
                error_code=ErrorCode.unsupported_version,
                error_message=_WHY,
            )
            yield
    return make.message(
        responses=tuple(
            make.ShareFetchableTopicResponse(topic_id=topic_id, partitions=tuple(parts.values()))
            for topic_id, parts in refused.items()
        )
    )
