"""OffsetFetch (9): how far groups have read.

Versions: 2 null topics (all of them) and an error at the top, 5 leader epochs, 7 RequireStable,
8 many groups, 9 member id and epoch, 10 topic ids in place of names.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from kio.schema.errors import ErrorCode

from coordinator.handlers import Context, handles
from coordinator.handlers.answers import answer, code_of, outcome
from coordinator.wire import ApiKey, Entity
from groups.commands import (
    NO_LEADER_EPOCH,
    NO_OFFSET,
    FetchedOffset,
    FetchOffsets,
    FetchOffsetsResult,
    FetchTopic,
)
from logcore.machine import DomainError


@handles(ApiKey.OFFSET_FETCH, versions=(1, 10), permission="DESCRIBE Group, DESCRIBE Topic")
def run(ctx: Context) -> Entity | Awaitable[Entity]:
    """Fetch for one group (below v8) or for many."""
    return _run_one(ctx) if ctx.version < 8 else _run_many(ctx)


# --- below version 8 -----------------------------------------------------------------------------


def _run_one(ctx: Context) -> Entity | Awaitable[Entity]:
    body, respond = ctx.body, ctx.respond

    def build(result: FetchOffsetsResult) -> Entity:
        return respond.OffsetFetchResponse(
            topics=tuple(
                respond.OffsetFetchResponseTopic(
                    name=name,
                    partitions=tuple(
                        _partition(respond.OffsetFetchResponsePartition, entry)
                        for entry in partitions
                    ),
                )
                for name, partitions in result.topics
            ),
            error_code=ErrorCode.none,
        )

    def refuse(code: ErrorCode) -> Entity:
        if ctx.version >= 2:
            return respond.OffsetFetchResponse(error_code=code)
        return respond.OffsetFetchResponse(
            topics=tuple(
                respond.OffsetFetchResponseTopic(
                    name=topic.name,
                    partitions=tuple(
                        _failed(respond.OffsetFetchResponsePartition, index, code)
                        for index in topic.partition_indexes
                    ),
                )
                for topic in body.topics
            )
        )

    command = FetchOffsets(
        group_id=body.group_id,
        topics=_all_or_asked(ctx, body.topics),
        require_stable=getattr(body, "require_stable", False),
    )
    return answer(ctx.broker.groups.submit(body.group_id, command, ctx.origin), build, refuse)


def _all_or_asked(ctx: Context, topics: Any) -> tuple[FetchTopic, ...] | None:
    if topics is None:
        return None
    return tuple(
        FetchTopic(topic.name, tuple(topic.partition_indexes), _id_bytes(ctx, topic.name))
        for topic in topics
    )


def _id_bytes(ctx: Context, name: str) -> bytes | None:
    """The topic's id, so that offsets of a deleted topic of that name are not taken for its own."""
    topic = ctx.broker.metadata.topic(name)
    return None if topic is None else topic.topic_id.bytes


# --- version 8 and above -------------------------------------------------------------------------


async def _run_many(ctx: Context) -> Entity:
    # All are asked before any is waited for, so that one loading shard costs no extra round.
    asked = [(group, _ask(ctx, group)) for group in ctx.body.groups]
    groups = [_group(ctx, group, names, await future) for group, (names, future) in asked]
    return ctx.respond.OffsetFetchResponse(groups=tuple(groups))


def _ask(ctx: Context, group: Any) -> tuple[list[str | None], Awaitable[Any]]:
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
                wanted.append(
                    FetchTopic(name, tuple(topic.partition_indexes), _id_bytes(ctx, name))
                )
        topics = tuple(wanted)
    command = FetchOffsets(
        group_id=group.group_id,
        topics=topics,
        require_stable=ctx.body.require_stable,
        member_id=getattr(group, "member_id", None),
        member_epoch=getattr(group, "member_epoch", -1),
    )
    return names, outcome(ctx.broker.groups.submit(group.group_id, command, ctx.origin))


def _group(
    ctx: Context, group: Any, names: list[str | None], result: FetchOffsetsResult | DomainError
) -> Entity:
    respond = ctx.respond
    if isinstance(result, DomainError):
        return respond.OffsetFetchResponseGroup(group_id=group.group_id, error_code=code_of(result))
    if group.topics is None:
        topics = [
            _topic(ctx, name, _id_of(ctx, name), partitions)
            for name, partitions in result.topics
            # By id a topic that is gone can't be named.
            if ctx.version < 10 or _id_of(ctx, name) is not None
        ]
    else:
        pairs = list(zip(group.topics, names, strict=True))
        known = [topic for topic, name in pairs if name is not None]
        topics = [
            _topic(ctx, name, getattr(topic, "topic_id", None), partitions)
            for topic, (name, partitions) in zip(known, result.topics, strict=True)
        ]
        # As in Kafka they follow those that exist, whatever the order they were asked in.
        topics += [_unknown_id(ctx, topic) for topic, name in pairs if name is None]
    return respond.OffsetFetchResponseGroup(
        group_id=group.group_id, topics=tuple(topics), error_code=ErrorCode.none
    )


def _topic(ctx: Context, name: str, topic_id: Any, partitions: tuple[FetchedOffset, ...]) -> Entity:
    respond = ctx.respond
    return respond.OffsetFetchResponseTopics(
        partitions=tuple(
            _partition(respond.OffsetFetchResponsePartitions, entry) for entry in partitions
        ),
        **({"topic_id": topic_id} if ctx.version >= 10 else {"name": name}),
    )


def _unknown_id(ctx: Context, topic: Any) -> Entity:
    respond = ctx.respond
    return respond.OffsetFetchResponseTopics(
        topic_id=topic.topic_id,
        partitions=tuple(
            _failed(respond.OffsetFetchResponsePartitions, index, ErrorCode.unknown_topic_id)
            for index in topic.partition_indexes
        ),
    )


def _id_of(ctx: Context, name: str) -> Any:
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


def _failed(make: Any, index: int, code: ErrorCode) -> Entity:
    return make(
        partition_index=index,
        committed_offset=NO_OFFSET,
        committed_leader_epoch=NO_LEADER_EPOCH,
        metadata="",
        error_code=code,
    )
