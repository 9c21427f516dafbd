"""DescribeTransactions (65): describe the state of transactional ids."""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import code_of, result_of
from fencepost.coordinator.handlers.rights import refused_topics
from fencepost.coordinator.runtime.turns import Work
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps
from fencepost.txn.commands import DescribeTransaction, DescribeTransactionResult


@handles(
    ApiKey.DESCRIBE_TRANSACTIONS, versions=(0, 0), permission="DESCRIBE TransactionalId and Topic"
)
def run(ctx: Context) -> Work[Entity]:
    """Describe each distinct id; errors are reported per id."""
    submit = ctx.broker.txns.submit
    states = []
    for name in dict.fromkeys(ctx.body.transactional_ids):
        if ctx.may(Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, name):
            result = yield from result_of(submit(name, DescribeTransaction(name)))
            states.append((yield from _state(ctx, name, result)))
        else:
            states.append(
                ctx.respond.TransactionState(
                    error_code=ErrorCode.transactional_id_authorization_failed,
                    transactional_id=name,
                )
            )
        yield None
    return ctx.respond.DescribeTransactionsResponse(transaction_states=tuple(states))


def _state(
    ctx: Context, name: str, result: DescribeTransactionResult | DomainError
) -> Steps[Entity]:
    """Build the state of one id, without the topics that the client may not describe."""
    respond = ctx.respond
    if isinstance(result, DomainError):
        return respond.TransactionState(error_code=code_of(result), transactional_id=name)
    topics: dict[str, list[int]] = {}
    for topic, index in result.partitions:
        topics.setdefault(topic, []).append(index)
    hidden = yield from refused_topics(ctx, Operation.DESCRIBE, topics, audited=False)
    return respond.TransactionState(
        error_code=ErrorCode.none,
        transactional_id=name,
        transaction_state=result.state,
        transaction_timeout_ms=result.transaction_timeout_ms,
        transaction_start_time_ms=result.start_time_ms,
        producer_id=result.producer_id,
        producer_epoch=result.producer_epoch,
        topics=tuple(
            respond.TopicData(topic=topic, partitions=tuple(indexes))
            for topic, indexes in topics.items()
            if topic not in hidden
        ),
    )
