"""CreatePartitions (37): add partitions to topics.

From version 3 on, a request that exceeds the client's quota fails; clients with older versions are
throttled afterwards.

Source: ``ReplicationControlManager.createPartitions``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.cluster.controller.topics import PreparedPartitions
from fencepost.coordinator.controller.topic_decisions import DRAW, PREPARED_FROM, prepare
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.errors import InvalidRequestError, TopicAuthorizationError
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import each_row, each_topic
from fencepost.coordinator.handlers.controller_decisions import decider
from fencepost.coordinator.runtime.turns import Work
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps

STRICT_QUOTA_SINCE = 3


def refused(ctx: Context, code: int, message: str | None) -> Steps[Entity]:
    """Refuse each topic for the same reason."""
    results = yield from each_row(
        ctx.body.topics, lambda topic: _row(ctx, topic.name, code, message)
    )
    return ctx.respond.CreatePartitionsResponse(results=results)


def _row(ctx: Context, name: str, code: int, message: str | None) -> Entity:
    return ctx.respond.CreatePartitionsTopicResult(
        name=name, error_code=code, error_message=message
    )


@handles(ApiKey.CREATE_PARTITIONS, versions=(0, 3), permission="ALTER Topic", refused=refused)
def run(ctx: Context) -> Work[Entity]:
    """Add partitions to each topic, or only validate that; refuse a topic that is named twice."""
    results = yield from each_topic(ctx, _answer)
    return ctx.respond.CreatePartitionsResponse(results=results)


def _answer(ctx: Context, name: str, topic: Any | None) -> Steps[Entity]:
    code, message = ErrorCode.none, None
    try:
        if topic is None:
            raise InvalidRequestError("Duplicate topic name.")
        if not ctx.may(Operation.ALTER, ResourceType.TOPIC, name):
            raise TopicAuthorizationError("Topic authorization failed.")
        assignments = topic.assignments
        replicas = (
            None if assignments is None else [assignment.broker_ids for assignment in assignments]
        )
        prepared = yield from _prepared(ctx, name, topic.count, replicas)
        decider(ctx)(
            lambda controller: controller.create_partitions(
                name,
                topic.count,
                assignments=replicas,
                draw=DRAW,
                charge=ctx.takes_partitions(strict_since=STRICT_QUOTA_SINCE),
                validate_only=ctx.body.validate_only,
                prepared=prepared,
            )
        )
    except DomainError as error:
        code, message = error_code(error), str(error)
    return _row(ctx, name, code, message)


def _prepared(
    ctx: Context, name: str, count: int, replicas: Sequence[Sequence[int]] | None
) -> Steps[PreparedPartitions | None]:
    """Choose the replicas of many partitions in steps, so that the decision itself is short.

    Return None if there are few partitions, or they cannot be placed.
    """
    topic = ctx.metadata.topic(name)
    if topic is None or count - len(topic.partitions) < PREPARED_FROM:
        return None
    return (
        yield from prepare(
            ctx.controller.current_machine,
            lambda controller: controller.prepare_partitions(
                name, count, assignments=replicas, draw=DRAW
            ),
        )
    )
