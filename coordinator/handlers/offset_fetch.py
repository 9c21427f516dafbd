"""OffsetFetch (9): how far groups have read.

Versions: 2 null topics (all of them) and an error at the top, 5 leader epochs, 7 RequireStable,
8 many groups, 9 member id and epoch, 10 topic ids in place of names.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import Future, code_of, result_of
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.groups.commands import (
    NO_LEADER_EPOCH,
    NO_OFFSET,
    FetchedOffset,
    FetchOffsets,
    FetchOffsetsResult,
    FetchTopic,
)
from fencepost.logcore.machine import DomainError


@handles(ApiKey.OFFSET_FETCH, versions=(1, 10), permission="DESCRIBE Group, DESCRIBE Topic")
def run(ctx: Context) -> Work[Entity]:
    """Fetch for one group (below v8) or for many."""
    return _run_one(ctx) if ctx.version < 8 else _run_many(ctx)


# --- below version 8 -----------------------------------------------------------------------------


def _run_one(ctx: Context) -> Work[Entity]:
    body, respond = ctx.body, ctx.respond
    wanted = None
    if body.topics is not None:
        wanted = []
        seen: set[tuple[str, int]] = set()
        for topic in body.topics:
            wanted.append(_wanted(ctx, topic.name, topic, seen))
            yield None
    command = FetchOffsets(
        group_id=body.group_id,
        topics=None if wanted is None else tuple(wanted),
        require_stable=getattr(body, "require_stable", False),
    )
    result = yield from result_of(ctx.broker.groups.submit(body.group_id, command, ctx.origin))
    make, topics = respond.OffsetFetchResponsePartition, []
    if not isinstance(result, DomainError):
        for name, partitions in result.topics:
            told = yield from _each(_partition, make, partitions)
            topics.append(respond.OffsetFetchResponseTopic(name=name, partitions=told))
        return respond.OffsetFetchResponse(topics=tuple(topics), error_code=ErrorCode.none)
    code = code_of(result)
    if ctx.version >= 2:
        return respond.OffsetFetchResponse(error_code=code)
    for topic in body.topics:
        told = yield from _each(partial(_failed, code), make, topic.partition_indexes)
        topics.append(respond.OffsetFetchResponseTopic(name=topic.name, partitions=told))
    return respond.OffsetFetchResponse(topics=tuple(topics))


def _wanted(ctx: Context, name: str, topic: Any, seen: set[tuple[str, int]]) -> FetchTopic:
    """What is asked of a topic, less what a group was asked before (``seen``).

    An offset may have 4 KiB of metadata, a thousand times what its index takes.
    """
    asked = dict.fromkeys((name, index) for index in topic.partition_indexes)
    new = tuple(index for _, index in asked if (name, index) not in seen)
    seen.update(asked)
    # The id keeps offsets of a deleted topic of that name from being taken for this one's.
    topic_id = _id_of(ctx, name)
    return FetchTopic(name, new, None if topic_id is None else topic_id.bytes)


# --- version 8 and above -------------------------------------------------------------------------


def _run_many(ctx: Context) -> Work[Entity]:
    # All are asked before any is waited for, so that one loading shard costs no extra round.
    asked, groups = [], []
    whole: set[str] = set()
    seen: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
    for group in ctx.body.groups:
        if group.topics is None:
            # All offsets of a group are answered once: a small request could ask for gigabytes.
            if group.group_id in whole:
                continue
            whole.add(group.group_id)
        names, future = yield from _ask(ctx, group, seen[group.group_id])
        asked.append((group, names, future))
        yield None
    for group, names, future in asked:
        result = yield from result_of(future)
        groups.append((yield from _group(ctx, group, names, result)))
        yield None
    return ctx.respond.OffsetFetchResponse(groups=tuple(groups))


def _ask(
    ctx: Context, group: Any, seen: set[tuple[str, int]]
) -> Work[tuple[list[str | None], Future]]:
    """Send one group's question; with the names of its topics, None for an unknown id."""
    names: list[str | None] = []
    topics: tuple[FetchTopic, ...] | None = None
    if group.topics is not None:
        wanted: list[FetchTopic] = []
        for topic in group.topics:
            name: str | None
            if ctx.version >= 10:
                found = ctx.broker.metadata.topic_by_id(topic.topic_id)
                name = None if found is None else found.name
            else:
                name = topic.name
            names.append(name)
            if name is not None:
                wanted.append(_wanted(ctx, name, topic, seen))
            yield None
        topics = tuple(wanted)
    command = FetchOffsets(
        group_id=group.group_id,
        topics=topics,
        require_stable=ctx.body.require_stable,
        member_id=getattr(group, "member_id", None),
        member_epoch=getattr(group, "member_epoch", -1),
    )
    return names, ctx.broker.groups.submit(group.group_id, command, ctx.origin)


def _group(
    ctx: Context, group: Any, names: list[str | None], result: FetchOffsetsResult | DomainError
) -> Work[Entity]:
    respond = ctx.respond
    if isinstance(result, DomainError):
        return respond.OffsetFetchResponseGroup(group_id=group.group_id, error_code=code_of(result))
    topics = []
    if group.topics is None:
        for name, partitions in result.topics:
            # Version 10 names topics by id, and a topic that is gone has none.
            if ctx.version < 10 or _id_of(ctx, name) is not None:
                topics.append((yield from _topic(ctx, name, _id_of(ctx, name), partitions)))
    else:
        pairs = list(zip(group.topics, names, strict=True))
        known = [topic for topic, name in pairs if name is not None]
        for topic, (name, partitions) in zip(known, result.topics, strict=True):
            topic_id = getattr(topic, "topic_id", None)
            topics.append((yield from _topic(ctx, name, topic_id, partitions)))
        # As in Kafka topics with an unknown id come last, wherever the request names them.
        for topic, known_name in pairs:
            if known_name is None:
                topics.append((yield from _unknown_id(ctx, topic)))
    return respond.OffsetFetchResponseGroup(
        group_id=group.group_id, topics=tuple(topics), error_code=ErrorCode.none
    )


def _topic(
    ctx: Context, name: str, topic_id: Any, partitions: Iterable[FetchedOffset]
) -> Work[Entity]:
    respond = ctx.respond
    told = yield from _each(_partition, respond.OffsetFetchResponsePartitions, partitions)
    return respond.OffsetFetchResponseTopics(
        partitions=told, **({"topic_id": topic_id} if ctx.version >= 10 else {"name": name})
    )


def _unknown_id(ctx: Context, topic: Any) -> Work[Entity]:
    respond = ctx.respond
    told = yield from _each(
        partial(_failed, ErrorCode.unknown_topic_id),
        respond.OffsetFetchResponsePartitions,
        topic.partition_indexes,
    )
    return respond.OffsetFetchResponseTopics(topic_id=topic.topic_id, partitions=told)


def _each(
    build: Callable[[Any, Any], Entity], make: Any, partitions: Iterable[Any]
) -> Work[tuple[Entity, ...]]:
    told = []
    for one in partitions:
        told.append(build(make, one))
        yield None
    return tuple(told)


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
