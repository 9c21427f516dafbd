"""OffsetCommit (8): commit the offsets of a group.

Versions 2 to 4 carry a retention time; version 6 adds the leader epoch, version 7 instance ids,
version 9 GROUP_ID_NOT_FOUND and STALE_MEMBER_EPOCH, version 10 topic ids instead of names. Every
error is reported per partition.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Iterable
from functools import lru_cache
from itertools import repeat
from typing import Final

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.handlers import Context, handles, request_ms
from fencepost.coordinator.handlers.answers import answer, code_of
from fencepost.coordinator.handlers.rights import NO_TOPICS, named_topics, refused_topics
from fencepost.groups.commands import (
    NO_LEADER_EPOCH,
    NO_RETENTION,
    CommitOffsets,
    CommitOffsetsResult,
    OffsetToCommit,
)
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.messages import ResponseFactory
from fencepost.protocol.steps import Steps

MAX_KEPT_ANSWERS: Final = 1_024
"""The maximum number of cached responses with one partition, of about a hundred bytes each. A
consumer that commits one partition gets the same response every time."""


FIRST_BY_ID: Final = 10


@handles(ApiKey.OFFSET_COMMIT, versions=(2, 10), permission="READ Group, READ Topic")
def run(ctx: Context) -> Entity | Awaitable[Entity] | Steps[Entity | Awaitable[Entity]]:
    """Commit the offsets of existing topics; refuse each of the others."""
    return _commit(ctx, NO_TOPICS) if ctx.broker.authorizer is None else _checked(ctx)


def _checked(ctx: Context) -> Steps[Entity | Awaitable[Entity]]:
    """Commit the offsets that the client may commit."""
    if not ctx.may(Operation.READ, ResourceType.GROUP, ctx.body.group_id):
        return _response(ctx, all_refused(ctx, ErrorCode.group_authorization_failed))
    names = names_of_topics(ctx, by_id=ctx.version >= FIRST_BY_ID)
    closed = yield from refused_topics(ctx, Operation.READ, names)
    return _commit(ctx, closed)


def names_of_topics(ctx: Context, *, by_id: bool) -> Iterable[str]:
    """Return the topic names in a commit request; with ``by_id``, only names of existing topics."""
    if not by_id:
        return named_topics(ctx.body.topics)
    find = ctx.broker.metadata.topic_by_id
    return (image.name for topic in ctx.body.topics if (image := find(topic.topic_id)) is not None)


def _commit(ctx: Context, closed: Collection[str]) -> Entity | Awaitable[Entity]:
    body, version = ctx.body, ctx.version
    refused, offsets = sort_out(ctx, closed, by_id=version >= FIRST_BY_ID, has_epoch=version >= 6)

    def build(result: CommitOffsetsResult) -> Entity:
        return _response(ctx, filled(refused, [code_of(row[2]) for row in result.partitions]))

    def refuse(all_others: ErrorCode) -> Entity:
        return _response(ctx, filled(refused, repeat(all_others)))

    if not offsets:
        return refuse(ErrorCode.none)
    observations = ctx.broker.observations
    if observations is not None:
        observations.committed(
            ctx.origin,
            body.group_id,
            body.member_id,
            body.generation_id_or_member_epoch,
            offsets,
        )
    command = CommitOffsets(
        body.group_id,
        body.generation_id_or_member_epoch,
        body.member_id,
        getattr(body, "group_instance_id", None),
        tuple(offsets),
        request_ms(body.retention_time) if version <= 4 else NO_RETENTION,
        version >= 9,
    )
    return answer(ctx.broker.groups.submit(body.group_id, command, ctx.origin), build, refuse)


Refusals = list[list[ErrorCode | None]]
"""By topic and partition of a request: the error, or None."""


def sort_out(
    ctx: Context, closed: Collection[str], *, by_id: bool, has_epoch: bool
) -> tuple[Refusals, list[OffsetToCommit]]:
    """Return the refused partitions of a commit request, and the offsets of the others.

    The error for a topic in ``closed`` does not reveal whether the topic exists.
    """
    metadata = ctx.broker.metadata
    no_topic = ErrorCode.unknown_topic_id if by_id else ErrorCode.unknown_topic_or_partition
    refused: Refusals = []
    offsets: list[OffsetToCommit] = []
    for topic_request in ctx.body.topics:
        topic = (
            metadata.topic_by_id(topic_request.topic_id)
            if by_id
            else metadata.topic(topic_request.name)
        )
        name = topic_request.name if not by_id else None if topic is None else topic.name
        if name in closed:
            refused.append([ErrorCode.topic_authorization_failed] * len(topic_request.partitions))
            continue
        if topic is None:
            refused.append([no_topic] * len(topic_request.partitions))
            continue
        is_existing = [
            0 <= entry.partition_index < len(topic.partitions) for entry in topic_request.partitions
        ]
        refused.append(
            [None if exists else ErrorCode.unknown_topic_or_partition for exists in is_existing]
        )
        topic_id = topic.topic_id.bytes
        offsets += [
            OffsetToCommit(
                topic.name,
                entry.partition_index,
                entry.committed_offset,
                entry.committed_leader_epoch if has_epoch else NO_LEADER_EPOCH,
                entry.committed_metadata or "",
                topic_id,
            )
            for entry, exists in zip(topic_request.partitions, is_existing, strict=True)
            if exists
        ]
    return refused, offsets


def all_refused(ctx: Context, code: ErrorCode) -> list[list[ErrorCode]]:
    """Return the same code for each partition."""
    return [[code] * len(topic.partitions) for topic in ctx.body.topics]


def filled(refused: Refusals, others: Iterable[ErrorCode]) -> list[list[ErrorCode]]:
    """Return a code for each partition: its error, or else the next of ``others``."""
    rest = iter(others)
    return [[code or next(rest) for code in topic] for topic in refused]


@lru_cache(maxsize=MAX_KEPT_ANSWERS)
def _partition(respond: ResponseFactory, index: int, code: ErrorCode) -> Entity:
    return respond.OffsetCommitResponsePartition(partition_index=index, error_code=code)


def _response(ctx: Context, codes: list[list[ErrorCode]]) -> Entity:
    respond, topics = ctx.respond, ctx.body.topics
    topic_field = "topic_id" if ctx.version >= FIRST_BY_ID else "name"
    if len(topics) == 1 and len(topics[0].partitions) == 1:
        index = topics[0].partitions[0].partition_index
        return _single_partition_response(
            respond, topic_field, getattr(topics[0], topic_field), index, codes[0][0]
        )
    return respond.OffsetCommitResponse(
        topics=tuple(
            respond.OffsetCommitResponseTopic(
                partitions=tuple(
                    _partition(respond, entry.partition_index, code)
                    for entry, code in zip(topic.partitions, topic_codes, strict=True)
                ),
                **{topic_field: getattr(topic, topic_field)},
            )
            for topic, topic_codes in zip(topics, codes, strict=True)
        )
    )


@lru_cache(maxsize=MAX_KEPT_ANSWERS)
def _single_partition_response(
    respond: ResponseFactory, topic_field: str, topic: object, index: int, code: ErrorCode
) -> Entity:
    """Build and cache the response to a request with one partition, the most common one."""
    of_topic = {"partitions": (_partition(respond, index, code),), topic_field: topic}
    return respond.OffsetCommitResponse(topics=(respond.OffsetCommitResponseTopic(**of_topic),))
