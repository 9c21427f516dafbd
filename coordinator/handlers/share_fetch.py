"""ShareFetch (78): share groups are not served here, and their consumers have to hear of it.

A cluster of Apache Kafka 4.3 has share groups. Where one of its brokers looks after a group, the
group's consumers come to whoever leads a partition. If that one does not know the request, Java's
consumer goes on in silence and without end; an error of a partition makes its ``poll`` fail.

Nothing is kept of a share session: who goes on with one is told to begin it anew
(SHARE_SESSION_NOT_FOUND), and then hears of its partitions again.

Source: ``ShareConsumeRequestManager``, ``ShareFetchCollector.handleInitializeErrors``, KIP-932.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.coordinator.wire.steps import Steps

FIRST_EPOCH: Final = 0
LAST_EPOCH: Final = -1

_WHY: Final = "share groups are not served by this broker"


@handles(ApiKey.SHARE_FETCH, versions=(1, 2), permission="READ Group")
def run(ctx: Context) -> Steps[Entity]:
    """Refuse each partition that a session begins with."""
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
