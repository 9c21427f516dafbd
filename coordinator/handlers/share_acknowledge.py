"""ShareAcknowledge (79): acknowledge records that a member of a share group has acquired.

Like ShareFetch, the request belongs to the member's share session and increments its epoch, but it
cannot open a session; epoch -1 ends the session. The response waits until the new states are
written. Version 2 adds renewals (KIP-1222).

Source: ``KafkaApis.handleShareAcknowledgeRequest``, ``SharePartitionManager.acknowledge`` and
``acknowledgeSessionUpdate``.
"""

from __future__ import annotations

from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.share_requests import (
    Acknowledgements,
    Readable,
    acknowledge_all,
    end_if_final,
    error_of,
    leader_fields,
    loaded,
    refusal_of,
    requested_partitions,
    response_error,
    settled,
    share_response,
)
from fencepost.coordinator.runtime.turns import Work
from fencepost.groups.share.session import SessionKey, ShareSession
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps


@handles(ApiKey.SHARE_ACKNOWLEDGE, versions=(1, 2), permission="READ Group and Topic")
def run(ctx: Context) -> Work[Entity]:
    """Respond with the result of each partition, once the new states are written."""
    refused = refusal_of(ctx)
    if refused is not None:
        return ctx.respond.error(refused)
    yield from loaded(ctx)
    try:
        session = session_of(ctx)
    except DomainError as error:
        return ctx.respond.error(error_code(error))
    readable = Readable(ctx)
    acknowledged = yield from acknowledge_all(ctx, readable, requested_partitions(ctx))
    yield from settled(ctx, acknowledged.values())
    answered = yield from _response(ctx, acknowledged)
    end_if_final(ctx, session)
    return answered


def session_of(ctx: Context) -> ShareSession:
    """Find the session of the request, and increment the session's epoch. Raises DomainError."""
    body = ctx.body
    return ctx.broker.shares.sessions.acknowledge(
        SessionKey(body.group_id, body.member_id), body.share_session_epoch
    )


def _response(ctx: Context, acknowledged: Acknowledgements) -> Steps[Entity]:
    make, leaders = ctx.respond, set[int]()
    by_topic: dict[bytes, list[Entity]] = {}
    for partition, answer in acknowledged.items():
        code, message = response_error(answer)
        by_topic.setdefault(partition.topic_id, []).append(
            make.PartitionData(
                partition_index=partition.partition,
                error_code=code,
                error_message=message,
                **leader_fields(ctx, partition, error_of(answer), leaders),
            )
        )
        yield
    return share_response(ctx, make.ShareAcknowledgeTopicResponse, by_topic, leaders)
