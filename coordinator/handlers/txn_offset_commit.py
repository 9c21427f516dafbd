"""TxnOffsetCommit (28): store offsets that take effect when the transaction commits.

The group's offsets partition must be in the transaction. The handler verifies this in the same turn
of the event loop in which it appends the offsets, so that the transaction cannot end in between.
Version 3 adds member data, version 4 TRANSACTION_ABORTABLE; version 5 adds the partition to the
transaction implicitly (TV2). Version 6 has topic ids instead of names, and other errors for a
missing group and for an old member epoch (KIP-1319). Every error is reported per partition.
"""

from __future__ import annotations

import asyncio
from itertools import repeat

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import code_of, result_of
from fencepost.coordinator.handlers.offset_commit import (
    Refusals,
    all_refused,
    filled,
    names_of_topics,
    sort_out,
)
from fencepost.coordinator.handlers.rights import refused_topics
from fencepost.coordinator.metadata.names import CONSUMER_OFFSETS
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.storage.appends import RequestState
from fencepost.groups.commands import (
    NO_GENERATION,
    CommitOffsetsResult,
    TxnCommitOffsets,
)
from fencepost.groups.errors import InvalidGroupIdError
from fencepost.logcore.errors import InvalidProducerEpochError
from fencepost.logcore.machine import DomainError, ProducerStamp
from fencepost.logcore.tracebacks import without_traceback
from fencepost.protocol import ApiKey, Entity
from fencepost.txn.errors import InvalidProducerIdMappingError

FIRST_VERSION_WITH_LOAD_IN_PROGRESS = 2
"""Older producers treat COORDINATOR_LOAD_IN_PROGRESS as fatal (KAFKA-7296)."""

FIRST_BY_ID = 6
"""The first version with topic ids; it also distinguishes GROUP_ID_NOT_FOUND and STALE_MEMBER_EPOCH
from ILLEGAL_GENERATION."""


@handles(
    ApiKey.TXN_OFFSET_COMMIT,
    versions=(0, 6),
    permission="WRITE TransactionalId, READ Group, READ Topic",
)
def run(ctx: Context) -> Work[Entity]:
    """Commit the offsets of existing topics; refuse each of the others."""
    body, by_id = ctx.body, ctx.version >= FIRST_BY_ID
    if not ctx.may(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, body.transactional_id):
        code = ErrorCode.transactional_id_authorization_failed
        return _response(ctx, all_refused(ctx, code))
    if not ctx.may(Operation.READ, ResourceType.GROUP, body.group_id):
        return _response(ctx, all_refused(ctx, ErrorCode.group_authorization_failed))
    closed = yield from refused_topics(ctx, Operation.READ, names_of_topics(ctx, by_id=by_id))
    request_state: RequestState = {}
    while True:
        refused, offsets = sort_out(ctx, closed, by_id=by_id, has_epoch=ctx.version >= 2)
        if not offsets:
            return _refused(ctx, refused, ErrorCode.none)
        try:
            disk = _verify(ctx, request_state)
        except DomainError as error:
            return _refused(ctx, refused, error_code(without_traceback(error)))
        if disk is None:
            break
        yield disk
    command = TxnCommitOffsets(
        group_id=body.group_id,
        generation_id=(
            body.generation_id_or_member_epoch
            if by_id
            else getattr(body, "generation_id", NO_GENERATION)
        ),
        member_id=getattr(body, "member_id", ""),
        group_instance_id=getattr(body, "group_instance_id", None),
        offsets=tuple(offsets),
        producer=ProducerStamp(body.producer_id, body.producer_epoch),
        knows_member_epochs=by_id,
    )
    result = yield from result_of(ctx.broker.groups.submit(body.group_id, command, ctx.origin))
    if isinstance(result, DomainError):
        return _refused(ctx, refused, error_code(result))
    committed: CommitOffsetsResult = result
    observations = ctx.broker.observations
    if observations is not None:
        observations.added_offsets(
            ctx.origin,
            body.transactional_id,
            body.group_id,
            member_id=command.member_id,
            generation=command.generation_id,
            version=ctx.version,
            topics=(offset.topic for offset in offsets),
        )
    return _response(ctx, filled(refused, [code_of(row[2]) for row in committed.partitions]))


def _refused(ctx: Context, refused: Refusals, code: ErrorCode) -> Entity:
    """Respond with ``code`` for every partition that is not refused yet."""
    loading = code is ErrorCode.coordinator_load_in_progress
    if loading and ctx.version < FIRST_VERSION_WITH_LOAD_IN_PROGRESS:
        code = ErrorCode.coordinator_not_available
    return _response(ctx, filled(refused, repeat(code)))


def _verify(ctx: Context, request_state: RequestState) -> asyncio.Future[None] | None:
    """Raise unless the transaction contains the group's partition, which TV2 adds implicitly.

    The function returns a future while the verification is in progress or its record is not
    committed yet. The caller calls it again when the future is done.
    """
    body, groups = ctx.body, ctx.broker.groups
    if not body.group_id:
        raise InvalidGroupIdError("a transaction can only commit offsets of a group with an id")
    if body.producer_id < 0:
        raise InvalidProducerIdMappingError("a transaction needs a producer id")
    partition = groups.partition_of(body.group_id)
    producers = partition.producers
    producers.check_epoch(body.producer_id, body.producer_epoch)
    if producers.has_open_transaction(body.producer_id, body.producer_epoch):
        return None
    key = CONSUMER_OFFSETS, partition.index
    verdicts = ctx.broker.txns.verify(
        "TxnOffsetCommit",
        ctx.version,
        body.transactional_id,
        body.producer_id,
        body.producer_epoch,
        (key,),
        ctx.origin,
        request_state,
    )
    if isinstance(verdicts, asyncio.Future):
        return verdicts
    error = verdicts[key]
    if error is not None:
        raise error
    if body.producer_epoch < 0:
        raise InvalidProducerEpochError(f"no producer has epoch {body.producer_epoch}")
    return None


def _response(ctx: Context, codes: list[list[ErrorCode]]) -> Entity:
    respond = ctx.respond
    names = "topic_id" if ctx.version >= FIRST_BY_ID else "name"
    return respond.TxnOffsetCommitResponse(
        topics=tuple(
            respond.TxnOffsetCommitResponseTopic(
                partitions=tuple(
                    respond.TxnOffsetCommitResponsePartition(
                        partition_index=entry.partition_index, error_code=code
                    )
                    for entry, code in zip(topic.partitions, topic_codes, strict=True)
                ),
                **{names: getattr(topic, names)},
            )
            for topic, topic_codes in zip(ctx.body.topics, codes, strict=True)
        )
    )
