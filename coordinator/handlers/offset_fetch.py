"""OffsetFetch (9): fetch the committed offsets of groups.

Version 2 adds a null array, which requests all topics, and a top-level error; version 5 adds leader
epochs, version 7 RequireStable, version 8 several groups, version 9 member id and epoch, version 10
topic ids instead of names.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.errors import GroupAuthorizationError
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import Future, code_of, result_of
from fencepost.coordinator.handlers.rights import named_topics, refused_topics
from fencepost.coordinator.runtime.errors import (
    CoordinatorNotAvailableError,
    NotCoordinatorError,
)
from fencepost.coordinator.runtime.turns import Work
from fencepost.groups.commands import (
    NO_LEADER_EPOCH,
    NO_OFFSET,
    FetchedOffset,
    FetchOffsets,
    FetchOffsetsResult,
    FetchTopic,
)
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity

FIRST_BY_ID: Final = 10

Asked = Future | DomainError
"""The pending result of a group, or the error of one that was not queried."""


@handles(ApiKey.OFFSET_FETCH, versions=(1, 10), permission="DESCRIBE Group, DESCRIBE Topic")
def run(ctx: Context) -> Work[Entity]:
    """Fetch the offsets of one group (below v8) or of several."""
    return _run_one(ctx) if ctx.version < 8 else _run_many(ctx)


# --- below version 8 -----------------------------------------------------------------------------


def _run_one(ctx: Context) -> Work[Entity]:
    body, respond = ctx.body, ctx.respond
    queries: list[FetchTopic] | None = None
    refused: list[Any] = []
    denied = _denied(ctx, body.group_id)
    if body.topics is not None and denied is None:
        queries = []
        closed = yield from refused_topics(ctx, Operation.DESCRIBE, named_topics(body.topics))
        seen: set[tuple[str, int]] = set()
        for topic in body.topics:
            if topic.name in closed:
                refused.append(topic)
            else:
                queries.append(_topic_query(ctx, topic.name, topic, seen))
            yield None
    command = FetchOffsets(
        group_id=body.group_id,
        topics=None if queries is None else tuple(queries),
        require_stable=getattr(body, "require_stable", False),
    )
    result = denied or (yield from _result_of(_submit(ctx, command)))
    make, topics = respond.OffsetFetchResponsePartition, []
    code = ErrorCode.topic_authorization_failed
    if isinstance(result, DomainError):
        code = code_of(result)
        if ctx.version >= 2:
            return respond.OffsetFetchResponse(error_code=code)
        refused = body.topics
    else:
        for name, partitions in result.topics:
            if queries is not None or _may_describe(ctx, name):
                responses = yield from _each(_partition, make, partitions)
                topics.append(respond.OffsetFetchResponseTopic(name=name, partitions=responses))
            yield None
    for topic in refused:
        responses = yield from _each(partial(_failed, code), make, topic.partition_indexes)
        topics.append(respond.OffsetFetchResponseTopic(name=topic.name, partitions=responses))
    return respond.OffsetFetchResponse(topics=tuple(topics), error_code=ErrorCode.none)


def _denied(ctx: Context, group_id: str) -> GroupAuthorizationError | None:
    """Return an error if the client may not describe the group, whether or not it exists."""
    if ctx.may(Operation.DESCRIBE, ResourceType.GROUP, group_id):
        return None
    return GroupAuthorizationError("the client may not describe the group")


def _submit(ctx: Context, command: FetchOffsets) -> Future:
    return ctx.broker.groups.submit(command.group_id, command, ctx.origin)


def _result_of(future: Future) -> Work[Any]:
    """Return the result, or an error that makes consumers look up the coordinator again.

    A coordinator whose followers do not replicate may be a zombie, and many clients do not handle
    COORDINATOR_NOT_AVAILABLE in this response (``handleOffsetFetchException``).
    """
    result = yield from result_of(future)
    if isinstance(result, CoordinatorNotAvailableError):
        return NotCoordinatorError(str(result))
    return result


def _may_describe(ctx: Context, name: str) -> bool:
    """Return whether the client may describe a topic that it has not named."""
    return ctx.may(Operation.DESCRIBE, ResourceType.TOPIC, name, audited=False)


def _topic_query(
    ctx: Context, name: str, topic: Any, requested_before: set[tuple[str, int]]
) -> FetchTopic:
    """Return the query for a topic, without the partitions in ``requested_before``.

    Otherwise, a small request that repeats an index could get a huge response: an offset may have 4
    KiB of metadata, a thousand times the size of an index.
    """
    keys = dict.fromkeys((name, index) for index in topic.partition_indexes)
    new = tuple(index for _, index in keys if (name, index) not in requested_before)
    requested_before.update(keys)
    # The id prevents the use of offsets of a deleted topic with the same name.
    topic_id = _id_of(ctx, name)
    return FetchTopic(name, new, None if topic_id is None else topic_id.bytes)


# --- version 8 and above -------------------------------------------------------------------------


def _run_many(ctx: Context) -> Work[Entity]:
    # All groups are queried before the first wait, so that a loading shard delays them once.
    pending: list[tuple[Any, list[ErrorCode], Asked]] = []
    try:
        yield from _ask_all(ctx, pending)
        groups = []
        for group, refused, answer in pending:
            result = answer if isinstance(answer, DomainError) else (yield from _result_of(answer))
            groups.append((yield from _group(ctx, group, refused, result)))
            yield None
    finally:
        # If the client has disconnected, the remaining results are never read.
        for _, _, answer in pending:
            if not isinstance(answer, DomainError) and not answer.cancel():
                _ = answer.cancelled() or answer.exception()
    return ctx.respond.OffsetFetchResponse(groups=tuple(groups))


def _ask_all(ctx: Context, pending: list[tuple[Any, list[ErrorCode], Asked]]) -> Work[None]:
    whole: set[str] = set()
    seen: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
    for group in ctx.body.groups:
        if group.topics is None:
            # Return all offsets of a group only once: otherwise a small request could get
            # gigabytes.
            if group.group_id in whole:
                continue
            whole.add(group.group_id)
        refused, answer = yield from _ask(ctx, group, seen[group.group_id])
        pending.append((group, refused, answer))
        yield None


def _ask(
    ctx: Context, group: Any, seen: set[tuple[str, int]]
) -> Work[tuple[list[ErrorCode], Asked]]:
    """Query one group; return the error of each topic (NONE if queried), and the pending result."""
    codes: list[ErrorCode] = []
    denied = _denied(ctx, group.group_id)
    if denied is not None:
        return codes, denied
    topics: tuple[FetchTopic, ...] | None = None
    if group.topics is not None:
        queries: list[FetchTopic] = []
        names: list[str | None] = []
        for topic in group.topics:
            names.append(_name(ctx, topic))
            yield None
        topic_names = (name for name in names if name is not None)
        closed = yield from refused_topics(ctx, Operation.DESCRIBE, topic_names)
        for topic, name in zip(group.topics, names, strict=True):
            if name is None:
                codes.append(ErrorCode.unknown_topic_id)
            elif name in closed:
                codes.append(ErrorCode.topic_authorization_failed)
            else:
                codes.append(ErrorCode.none)
                queries.append(_topic_query(ctx, name, topic, seen))
            yield None
        topics = tuple(queries)
    command = FetchOffsets(
        group_id=group.group_id,
        topics=topics,
        require_stable=ctx.body.require_stable,
        member_id=getattr(group, "member_id", None),
        member_epoch=getattr(group, "member_epoch", -1),
    )
    return codes, _submit(ctx, command)


def _name(ctx: Context, topic: Any) -> str | None:
    if ctx.version < FIRST_BY_ID:
        name: str = topic.name
        return name
    image = ctx.broker.metadata.topic_by_id(topic.topic_id)
    return None if image is None else image.name


def _group(
    ctx: Context, group: Any, codes: list[ErrorCode], result: FetchOffsetsResult | DomainError
) -> Work[Entity]:
    respond = ctx.respond
    if isinstance(result, DomainError):
        return respond.OffsetFetchResponseGroup(group_id=group.group_id, error_code=code_of(result))
    topics = []
    if group.topics is None:
        for name, partitions in result.topics:
            # Version 10 needs topic ids, and a deleted topic has none.
            has_key = ctx.version < FIRST_BY_ID or _id_of(ctx, name) is not None
            if has_key and _may_describe(ctx, name):
                topics.append((yield from _topic(ctx, name, _id_of(ctx, name), partitions)))
            yield None
    else:
        pairs = list(zip(group.topics, codes, strict=True))
        existing = [topic for topic, code in pairs if code is ErrorCode.none]
        for topic, (name, partitions) in zip(existing, result.topics, strict=True):
            topic_id = getattr(topic, "topic_id", None)
            topics.append((yield from _topic(ctx, name, topic_id, partitions)))
        # As in Kafka, refused topics come last, regardless of their order in the request.
        for topic, code in pairs:
            if code is not ErrorCode.none:
                topics.append((yield from _refused(ctx, topic, code)))
    return respond.OffsetFetchResponseGroup(
        group_id=group.group_id, topics=tuple(topics), error_code=ErrorCode.none
    )


def _topic(
    ctx: Context, name: str, topic_id: Any, partitions: Iterable[FetchedOffset]
) -> Work[Entity]:
    responses = yield from _each(_partition, ctx.respond.OffsetFetchResponsePartitions, partitions)
    return _named(ctx, name, topic_id, responses)


def _named(ctx: Context, name: str, topic_id: Any, partitions: tuple[Entity, ...]) -> Entity:
    """Build one topic of the response; a field that the version lacks is dropped."""
    return ctx.respond.OffsetFetchResponseTopics(
        name=name, topic_id=topic_id, partitions=partitions
    )


def _refused(ctx: Context, topic: Any, code: ErrorCode) -> Work[Entity]:
    make = ctx.respond.OffsetFetchResponsePartitions
    responses = yield from _each(partial(_failed, code), make, topic.partition_indexes)
    return _named(ctx, getattr(topic, "name", ""), getattr(topic, "topic_id", None), responses)


def _each(
    build: Callable[[Any, Any], Entity], make: Any, partitions: Iterable[Any]
) -> Work[tuple[Entity, ...]]:
    responses = []
    for partition in partitions:
        responses.append(build(make, partition))
        yield None
    return tuple(responses)


def _id_of(ctx: Context, name: str) -> uuid.UUID | None:
    topic = ctx.broker.metadata.topic(name)
    return None if topic is None else topic.topic_id


def _partition(make: Any, entry: FetchedOffset) -> Entity:
    return make(
        partition_index=entry.partition,
        committed_offset=entry.offset,
        committed_leader_epoch=entry.leader_epoch,
        metadata=entry.metadata,
        error_code=code_of(entry.error),
    )


def _failed(code: ErrorCode, make: Any, index: int) -> Entity:
    return make(
        partition_index=index,
        committed_offset=NO_OFFSET,
        committed_leader_epoch=NO_LEADER_EPOCH,
        metadata="",
        error_code=code,
    )
