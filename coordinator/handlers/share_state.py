"""The common part of the requests to the share coordinator (APIs 83 to 87).

Brokers send these requests. Each request names share partitions of one group, and each share
partition gets its own result. The handler sends all commands of a request before it waits for the
first result.

Source: ``ShareCoordinatorService``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context
from fencepost.coordinator.runtime.turns import Work
from fencepost.groups.share.commands import SharePartitionKey
from fencepost.groups.share.coordinator_key import coordinator_key
from fencepost.groups.share.errors import InvalidShareRequestError
from fencepost.logcore.machine import DomainError
from fencepost.logcore.tracebacks import without_traceback
from fencepost.protocol import ApiKey, Entity

NO_TOPIC: Final = "The topic id cannot be null."

_RESULTS: Final = {
    ApiKey.INITIALIZE_SHARE_GROUP_STATE: "InitializeStateResult",
    ApiKey.READ_SHARE_GROUP_STATE: "ReadStateResult",
    ApiKey.WRITE_SHARE_GROUP_STATE: "WriteStateResult",
    ApiKey.DELETE_SHARE_GROUP_STATE: "DeleteStateResult",
    ApiKey.READ_SHARE_GROUP_STATE_SUMMARY: "ReadStateSummaryResult",
}
"""kio's structure for the results of one topic, by API."""

Command = Callable[[SharePartitionKey, Any], object]
"""Builds the command for a share partition from its entry in the request."""

Result = Callable[[object], dict[str, Any]]
"""Returns the fields of a partition's result from the state machine's reply."""


def no_fields(_reply: object) -> dict[str, Any]:
    """Return nothing: the result has no field besides the error."""
    return {}


def answers(ctx: Context, command: Command, result: Result = no_fields) -> Work[Entity]:
    """Send the command of each partition, and respond with the results.

    A request with an empty group id, or with a topic without partitions, gets an empty response, as
    in Kafka.
    """
    body, coordinator = ctx.body, ctx.broker.share_coordinator
    ctx.require_on_cluster(Operation.CLUSTER_ACTION)
    if not body.group_id or not all(topic.partitions for topic in body.topics):
        return ctx.respond.message(results=())
    pending: list[tuple[UUID | None, list[tuple[int, asyncio.Future[object] | DomainError]]]] = []
    for topic in body.topics:
        replies: list[tuple[int, asyncio.Future[object] | DomainError]] = []
        for part in topic.partitions:
            try:
                if topic.topic_id is None:
                    raise InvalidShareRequestError(NO_TOPIC)
                key = SharePartitionKey(body.group_id, topic.topic_id.bytes, part.partition)
                reply = coordinator.submit(coordinator_key(key), command(key, part))
                replies.append((part.partition, reply))
            except DomainError as error:
                replies.append((part.partition, without_traceback(error)))
            yield None
        pending.append((topic.topic_id, replies))
    results: list[Entity] = []
    for topic_id, sent in pending:
        parts: list[Entity] = []
        for index, coming in sent:
            parts.append((yield from _result(ctx, index, coming, result)))
        results.append(_topic(ctx, topic_id, parts))
    return ctx.respond.message(results=tuple(results))


def _topic(ctx: Context, topic_id: UUID | None, parts: list[Entity]) -> Entity:
    make = getattr(ctx.respond, _RESULTS[ApiKey(ctx.api_key)])
    result: Entity = make(topic_id=topic_id, partitions=tuple(parts))
    return result


def _result(
    ctx: Context, index: int, reply: asyncio.Future[object] | DomainError, result: Result
) -> Work[Entity]:
    code, message, fields = ErrorCode.none, None, dict[str, Any]()
    try:
        if isinstance(reply, DomainError):
            raise reply
        if not reply.done():
            yield reply
        fields = result(reply.result())
    except DomainError as error:
        without_traceback(error)
        code, message = error_code(error), str(error)
    return ctx.respond.PartitionResult(
        partition=index, error_code=code, error_message=message, **fields
    )


def refused(ctx: Context, code: int, message: str | None) -> Work[Entity]:
    """Build the response to a refused request: the error of each partition."""
    results: list[Entity] = []
    for topic in ctx.body.topics:
        parts: list[Entity] = []
        for part in topic.partitions:
            parts.append(
                ctx.respond.PartitionResult(
                    partition=part.partition, error_code=code, error_message=message
                )
            )
            yield None
        results.append(_topic(ctx, topic.topic_id, parts))
    return ctx.respond.message(results=tuple(results))
