"""DeleteTopics (20): delete topics by name or by id.

Version 3 introduces TOPIC_DELETION_DISABLED. Version 5 adds error messages, and refuses a request
that exceeds the client's quota. Version 6 adds topic ids.

Source: ``ControllerApis.deleteTopics``.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter, deque
from collections.abc import Iterator

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.cluster.image import TopicImage
from fencepost.coordinator.controller.topic_decisions import delete_topic
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.errors import (
    InvalidRequestError,
    TopicAuthorizationError,
    TopicDeletionDisabledError,
    UnknownTopicIdError,
)
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import each_row
from fencepost.coordinator.handlers.controller_decisions import decider
from fencepost.coordinator.runtime.background import SLICE_MS, Pace
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps

FIRST_WITH_DELETION_DISABLED = 3
STRICT_QUOTA_SINCE = 5
FIRST_BY_ID = 6

Asked = tuple[str | None, uuid.UUID | None]
Resolved = str | uuid.UUID | None


def refused(ctx: Context, code: int, message: str | None) -> Steps[Entity]:
    """Refuse each topic for the same reason."""
    responses = yield from each_row(
        _requested_topics(ctx), lambda requested: _row(ctx, *requested, code, message)
    )
    return ctx.respond.DeleteTopicsResponse(responses=responses)


def _row(
    ctx: Context, name: str | None, topic_id: uuid.UUID | None, code: int, message: str | None
) -> Entity:
    return ctx.respond.DeletableTopicResult(
        name=name, topic_id=topic_id, error_code=code, error_message=message
    )


@handles(
    ApiKey.DELETE_TOPICS,
    versions=(1, 6),
    permission="DELETE Cluster or Topic",
    refused=refused,
)
async def run(ctx: Context) -> Entity:
    """Delete each topic; refuse a topic named twice, even if once by name and once by id."""
    counts: Counter[Asked] = Counter()
    named: Counter[Resolved] = Counter()
    pace = Pace()
    for topic_request in _requested_topics(ctx):
        counts[topic_request] += 1
        named[_resolved(ctx, topic_request)] += 1
        await pace()
    waiting = deque(counts.items())
    results: list[Entity] = []
    deleted: list[TopicImage] = []
    while waiting:
        results += _delete_slice(ctx, waiting, named, deleted)
        await asyncio.sleep(0)
    if deleted:
        written = ctx.controller.store.durable()
        if written is not None:
            await written  # in a ZooKeeper cluster: until ZooKeeper has the change
        await ctx.broker.topics_forgotten()
    return ctx.respond.DeleteTopicsResponse(responses=tuple(results))


def _delete_slice(
    ctx: Context,
    waiting: deque[tuple[Asked, int]],
    named: Counter[Resolved],
    deleted: list[TopicImage],
) -> list[Entity]:
    """Delete as many topics as fit into one turn of the event loop."""
    until = monotonic_s() + SLICE_MS / 1000
    results: list[Entity] = []
    while waiting and monotonic_s() < until:
        requested, times = waiting.popleft()
        results.append(_answer(ctx, requested, deleted, times=times, named=named))
    return results


def _answer(
    ctx: Context,
    requested: Asked,
    deleted: list[TopicImage],
    *,
    times: int,
    named: Counter[Resolved],
) -> Entity:
    name, topic_id = requested
    code, message = ErrorCode.none, None
    try:
        topic = _delete(ctx, requested, times=times, named=named)
        deleted.append(topic)
        name, topic_id = topic.name, topic.topic_id
    except DomainError as error:
        code, message = error_code(error), str(error)
        if isinstance(error, TopicAuthorizationError) and topic_id is not None:
            name = _name_for(ctx, topic_id)
        old = ctx.version < FIRST_WITH_DELETION_DISABLED
        if old and isinstance(error, TopicDeletionDisabledError):
            code = ErrorCode.invalid_request
    return _row(ctx, name, topic_id, code, message)


def _requested_topics(ctx: Context) -> Iterator[Asked]:
    if ctx.version < FIRST_BY_ID:
        for name in ctx.body.topic_names:
            yield name, None
    else:
        for topic in ctx.body.topics:
            yield topic.name, topic.topic_id


def _resolved(ctx: Context, requested: Asked) -> Resolved:
    name, topic_id = requested
    if name is not None:
        return name
    topic = ctx.metadata.topic_by_id(topic_id)
    return topic_id if topic is None else str(topic.name)


def _delete(ctx: Context, requested: Asked, *, times: int, named: Counter[Resolved]) -> TopicImage:
    """Delete one topic from the metadata, and return it. Raises DomainError."""
    if not ctx.broker.config.bool("delete.topic.enable"):
        raise TopicDeletionDisabledError("delete.topic.enable is off")
    name, topic_id = requested
    if name is not None and topic_id is not None:
        raise InvalidRequestError("You may not specify both topic name and topic id.")
    if name is None and topic_id is None:
        raise InvalidRequestError("Neither topic name nor id were specified.")
    if times > 1:
        raise InvalidRequestError("Duplicate topic name or topic id.")
    by_name = name is not None
    if name is None:
        image = ctx.metadata.topic_by_id(topic_id)
        if image is None:
            raise UnknownTopicIdError("This server does not host this topic ID.")
        name = image.name
    _check_rights(ctx, name, by_name=by_name)
    if named[name] > 1:  # last: an unauthorized client must not learn which topic has the id
        raise InvalidRequestError("The topic is named by its name and by its id.")
    topic = ctx.metadata.known(name)
    delete_topic(decider(ctx), topic, ctx.takes_partitions(strict_since=STRICT_QUOTA_SINCE))
    return topic


def _check_rights(ctx: Context, name: str, *, by_name: bool) -> None:
    """Check DELETE, and DESCRIBE before revealing whether a named topic exists.

    Raises TopicAuthorizationError, UnknownTopicOrPartitionError.
    """
    if ctx.may_on_cluster(Operation.DELETE, audited=False):
        return
    may_describe = ctx.may(Operation.DESCRIBE, ResourceType.TOPIC, name)
    may_delete = ctx.may(Operation.DELETE, ResourceType.TOPIC, name)
    if by_name and may_describe:
        ctx.metadata.known(name)
    if not may_delete or (by_name and not may_describe):
        raise TopicAuthorizationError("Topic authorization failed.")


def _name_for(ctx: Context, topic_id: uuid.UUID) -> str | None:
    """Return the name for a requested topic id, if the client may describe the topic."""
    topic = ctx.metadata.topic_by_id(topic_id)
    if topic and ctx.may(Operation.DESCRIBE, ResourceType.TOPIC, topic.name, audited=False):
        return str(topic.name)
    return None
