"""AddPartitionsToTxn (24): add partitions to a transaction before the producer writes.

Clients use versions 0 to 3, with one transaction. If any partition is unknown or internal, no
partition is added, and the valid ones get OPERATION_NOT_ATTEMPTED. Version 2 introduces
PRODUCER_FENCED. Brokers use versions 4 and 5, with many transactions; with VerifyOnly, no partition
is added.

Difference from Kafka: versions 4 and 5 refuse internal topics except ``__consumer_offsets``, which
group coordinators add. Without an authorizer any client may send these versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Mapping
from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import (
    Future,
    before_producer_fenced,
    code_of,
    result_of,
)
from fencepost.coordinator.handlers.rights import named_topics, refused_topics
from fencepost.coordinator.metadata.names import INTERNAL_TOPICS, OUTSIDE_TRANSACTIONS
from fencepost.coordinator.runtime.turns import Work
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps
from fencepost.txn.commands import AddPartitions, AddPartitionsResult, TopicPartition

FIRST_WITH_PRODUCER_FENCED = 2
FIRST_BATCHED_VERSION = 4

Code = Callable[[TopicPartition], ErrorCode]
"""Returns the error code of each partition of a transaction."""


@handles(
    ApiKey.ADD_PARTITIONS_TO_TXN,
    versions=(0, 5),
    permission="WRITE TransactionalId, WRITE Topic; from v4 CLUSTER_ACTION Cluster",
)
def run(ctx: Context) -> Work[Entity]:
    """Add the partitions of one transaction (clients) or of several (brokers)."""
    return _run_one(ctx) if ctx.version < FIRST_BATCHED_VERSION else _run_many(ctx)


def _run_one(ctx: Context) -> Work[Entity]:
    topics = ctx.body.v3_and_below_topics
    code = yield from _client_transaction(ctx, topics)
    results = yield from _topic_results(ctx, topics, code)
    return ctx.respond.AddPartitionsToTxnResponse(results_by_topic_v3_and_below=results)


def _client_transaction(ctx: Context, topics: Any) -> Work[Code]:
    """Add a client's partitions if it is authorized for all of them; return their error codes."""
    body = ctx.body
    transactional_id = body.v3_and_below_transactional_id
    if not ctx.may(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, transactional_id):
        return lambda _: ErrorCode.transactional_id_authorization_failed
    closed = yield from refused_topics(ctx, Operation.WRITE, named_topics(topics))
    refused = yield from _refused(ctx, topics, INTERNAL_TOPICS.union(closed))
    if refused:
        return _refusal(refused)
    command = AddPartitions(
        transactional_id,
        body.v3_and_below_producer_id,
        body.v3_and_below_producer_epoch,
        _partitions(topics),
    )
    submitted = ctx.broker.txns.submit(command.transactional_id, command, ctx.origin)
    return (yield from _answered(ctx, submitted))


def _run_many(ctx: Context) -> Work[Entity]:
    respond = ctx.respond
    if not ctx.may_on_cluster(Operation.CLUSTER_ACTION):
        return respond.error(ErrorCode.cluster_authorization_failed)
    results = []
    # Submit all transactions before waiting for the first result: replication may take time.
    verifications = []
    for transaction in ctx.body.transactions:
        begun = yield from _transaction(ctx, transaction)
        verifications.append((transaction, begun))
    for transaction, begun in verifications:
        code = yield from _answered(ctx, begun)
        topics = yield from _topic_results(ctx, transaction.topics, code)
        results.append(
            respond.AddPartitionsToTxnResult(
                transactional_id=transaction.transactional_id, topic_results=topics
            )
        )
    return respond.AddPartitionsToTxnResponse(
        error_code=ErrorCode.none, results_by_transaction=tuple(results)
    )


def _transaction(ctx: Context, transaction: Any) -> Steps[Code | Future]:
    """Submit one transaction; return its error codes, or the future of its result."""
    refused = yield from _refused(ctx, transaction.topics, OUTSIDE_TRANSACTIONS)
    if refused:
        return _refusal(refused)
    command = AddPartitions(
        transaction.transactional_id,
        transaction.producer_id,
        transaction.producer_epoch,
        _partitions(transaction.topics),
        verify_only=transaction.verify_only,
        client_transaction_version=2,
    )
    return ctx.broker.txns.submit(command.transactional_id, command, ctx.origin)


def _answered(ctx: Context, verification: Code | Future) -> Work[Code]:
    if not isinstance(verification, asyncio.Future):
        return verification
    result: AddPartitionsResult | DomainError = yield from result_of(verification)
    if isinstance(result, DomainError):
        code = code_of(result)
        if ctx.version < FIRST_BATCHED_VERSION:
            code = before_producer_fenced(code, known=ctx.version >= FIRST_WITH_PRODUCER_FENCED)
        return lambda _: code
    errors = result.errors
    return lambda key: code_of(errors.get(key))


def _refusal(refused: Mapping[TopicPartition, ErrorCode]) -> Code:
    return lambda key: refused.get(key, ErrorCode.operation_not_attempted)


def _partitions(topics: Any) -> tuple[TopicPartition, ...]:
    return tuple((topic.name, index) for topic in topics for index in topic.partitions)


def _refused(
    ctx: Context, topics: Any, closed: Container[str]
) -> Steps[Mapping[TopicPartition, ErrorCode]]:
    """Return an error for each partition that does not exist or whose topic is in ``closed``."""
    refused: dict[TopicPartition, ErrorCode] = {}
    for topic in topics:
        topic_image = ctx.broker.metadata.topic(topic.name)
        for index in topic.partitions:
            if topic.name in closed:
                refused[topic.name, index] = ErrorCode.topic_authorization_failed
            elif topic_image is None or not 0 <= index < len(topic_image.partitions):
                refused[topic.name, index] = ErrorCode.unknown_topic_or_partition
            yield
    return refused


def _topic_results(ctx: Context, topics: Any, code: Code) -> Steps[tuple[Entity, ...]]:
    respond = ctx.respond
    results = []
    for topic in topics:
        parts = []
        for index in topic.partitions:
            parts.append(
                respond.AddPartitionsToTxnPartitionResult(
                    partition_index=index, partition_error_code=code((topic.name, index))
                )
            )
            yield
        results.append(
            respond.AddPartitionsToTxnTopicResult(
                name=topic.name, results_by_partition=tuple(parts)
            )
        )
    return tuple(results)
