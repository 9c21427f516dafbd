"""Produce (0): append a record batch to each partition (``appends.py``).

Version 7 allows zstd, version 8 adds RecordErrors, version 10 the current leader in errors
(KIP-951), version 11 TRANSACTION_ABORTABLE. From version 12 on the broker adds partitions to the
transaction; version 13 names topics by id.

Difference from Kafka: the internal topics are closed to every client, including ``__admin_client``.
Only the coordinators write to them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any, Final

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.cluster.errors import NotLeaderOrFollowerError
from fencepost.coordinator.errors import (
    NotEnoughReplicasAfterAppendError,
    RequestTimedOutError,
    TopicAuthorizationError,
    TransactionalIdAuthorizationError,
)
from fencepost.coordinator.handlers import CloseConnection, Context, handles, request_ms
from fencepost.coordinator.handlers.answers import code_of
from fencepost.coordinator.handlers.leader_hints import endpoints, leader_hint
from fencepost.coordinator.handlers.rights import refused_topics
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.storage.appends import Append, Part
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps

FIRST_BY_ID: Final = 13

_APPENDED: Final = (
    NotEnoughReplicasAfterAppendError,
    NotLeaderOrFollowerError,
    RequestTimedOutError,
)
"""Errors after a successful append; the response still contains the base offset."""


@handles(ApiKey.PRODUCE, versions=(3, 13), permission="WRITE Topic, WRITE TransactionalId")
def run(ctx: Context) -> Work[Entity | None]:
    """Append, then respond; return None for acks=0, where an error closes the connection."""
    body, make = ctx.body, ctx.respond
    all_parts = [
        Part(name, part.index, part.records)
        for topic in body.topic_data
        for name in (_name(ctx, topic),)
        for part in topic.partition_data
    ]
    append = Append(
        all_parts,
        version=ctx.version,
        transactional_id=body.transactional_id,
        origin=ctx.origin,
        acks=body.acks,
        client=id(ctx.connection),
        throttle=ctx.throttle,
    )
    if ctx.broker.commits.has_replicated:
        append.timeout_ms = request_ms(body.timeout)
    if ctx.broker.authorizer is not None:
        append = yield from _allowed(ctx, append)
    observations = ctx.broker.observations
    if observations is not None and append.parts:
        observations.produced(
            ctx.client_id,
            ctx.peer_host,
            body.transactional_id,
            body.acks,
            [part.topic for part in append.parts],
        )
    yield from ctx.broker.appends.run(append)
    if not append.acks:
        failed = next((part.error for part in all_parts if part.error is not None), None)
        if failed is not None:
            raise CloseConnection(f"a produce request without acks failed: {failed}")
        return None
    parts = iter(all_parts)
    leaders: set[int] = set()
    topics: list[Entity] = []
    for topic in body.topic_data:
        partition_responses: list[Entity] = []
        for part in islice(parts, len(topic.partition_data)):
            if topics or partition_responses:
                yield None
            partition_responses.append(_partition(ctx, part, leaders))
        topics.append(
            make.TopicProduceResponse(
                # Up to version 12 a topic is identified by name, from version 13 on by id.
                name=getattr(topic, "name", ""),
                topic_id=getattr(topic, "topic_id", None),
                partition_responses=tuple(partition_responses),
            )
        )
    nodes = endpoints(ctx, leaders) if leaders else {}
    return make.ProduceResponse(responses=tuple(topics), **nodes)


def _allowed(ctx: Context, append: Append) -> Steps[Append]:
    """Return the request with only the batches that the client may append; refuse the others.

    Without WRITE on the transactional id the whole request is refused, including batches that are
    not part of the transaction.
    """
    parts, transactional_id = append.parts, append.transactional_id
    error: DomainError
    if append.producers and transactional_id is None:
        return append  # the append will refuse the whole request for the missing id
    if append.producers and not ctx.may(
        Operation.WRITE, ResourceType.TRANSACTIONAL_ID, transactional_id or ""
    ):
        error = TransactionalIdAuthorizationError("the client may not use the transactional id")
        refused = parts
    else:
        names = (part.topic for part in parts if part.topic is not None)
        closed = yield from refused_topics(ctx, Operation.WRITE, names)
        error = TopicAuthorizationError("the client may not write to the topic")
        refused = [part for part in parts if part.topic in closed] if closed else []
    if not refused:
        return append
    for part in refused:
        part.error = error
    return replace(append, parts=[part for part in parts if part.error is None])


def _name(ctx: Context, topic: Any) -> str | None:
    if ctx.version < FIRST_BY_ID:
        name: str = topic.name
        return name
    image = ctx.broker.metadata.topic_by_id(topic.topic_id)
    return None if image is None else image.name


def _partition(ctx: Context, part: Part, leaders: set[int]) -> Entity:
    make, error, appended = ctx.respond, part.error, part.appended
    if error is None and appended is not None:
        return make.PartitionProduceResponse(
            index=part.index,
            error_code=ErrorCode.none,
            base_offset=appended.base_offset,
            log_append_time_ms=appended.log_append_time_ms,
            log_start_offset=appended.log_start_offset,
            record_errors=(),
        )
    leader: dict[str, Entity] = {}
    if isinstance(error, NotLeaderOrFollowerError) and part.topic is not None:
        leader = leader_hint(ctx, part.topic, part.index, leaders)
    if appended is not None and isinstance(error, _APPENDED):
        return make.PartitionProduceResponse(
            index=part.index,
            error_code=code_of(error),
            base_offset=appended.base_offset,
            log_append_time_ms=appended.log_append_time_ms,
            log_start_offset=appended.log_start_offset,
            record_errors=(),
            **leader,
        )
    return make.PartitionProduceResponse(
        index=part.index,
        error_code=code_of(error),
        base_offset=-1,
        log_append_time_ms=-1,
        log_start_offset=part.log_start_offset,
        record_errors=tuple(
            make.BatchIndexAndErrorMessage(batch_index=at, batch_index_error_message=text)
            for at, text in getattr(error, "record_errors", ())
        ),
        error_message=str(error),
        **leader,
    )
