"""ElectLeaders (43): let the preferred replica lead, or any. The only one does.

So no election is needed, and where the file system has failed none helps. Version 1 has the type of
the election (KIP-460) and an error for the whole; before, all were for the preferred replica.

Source: ``ReplicationControlManager.electLeaders``.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.security.acl import Operation
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.coordinator.wire.steps import Steps
from fencepost.logcore.machine import DomainError

PREFERRED, UNCLEAN = 0, 1
NO_LEADER_TO_BE = {
    PREFERRED: ErrorCode.preferred_leader_not_available,
    UNCLEAN: ErrorCode.eligible_leaders_not_available,
}


@handles(ApiKey.ELECT_LEADERS, versions=(0, 2), permission="ALTER Cluster")
def run(ctx: Context) -> Steps[Entity]:
    """Answer each partition; asked for all, only those that stay without a leader."""
    make, body = ctx.respond, ctx.body
    kind = getattr(body, "election_type", PREFERRED)
    everything = body.topic_partitions is None
    is_known = kind in NO_LEADER_TO_BE
    if not ctx.may_on_cluster(Operation.ALTER):
        return (yield from _refused(ctx))
    if everything and not is_known:
        return make.error(ErrorCode.invalid_request)
    asked = (
        [(one.name, range(one.partitions)) for one in ctx.broker.metadata.topics.values()]
        if everything
        else [(one.topic, one.partitions) for one in body.topic_partitions]
    )
    results = []
    for topic, indexes in asked:
        parts = []
        for index in indexes:
            code, message = _outcome(ctx, topic, index, kind)
            if not (everything and code is ErrorCode.election_not_needed):
                parts.append(
                    make.PartitionResult(partition_id=index, error_code=code, error_message=message)
                )
            yield
        results.append(make.ReplicaElectionResult(topic=topic, partition_result=tuple(parts)))
        yield
    return make.ElectLeadersResponse(
        error_code=ErrorCode.none if is_known or not results else ErrorCode.invalid_request,
        replica_election_results=tuple(results),
    )


def _refused(ctx: Context) -> Steps[Entity]:
    """The answer to who may not alter the cluster, which tells nothing of partitions."""
    make = ctx.respond
    code, message = ErrorCode.cluster_authorization_failed, "Cluster authorization failed."
    results = []
    for one in ctx.body.topic_partitions or ():
        parts = []
        for index in one.partitions:
            parts.append(
                make.PartitionResult(partition_id=index, error_code=code, error_message=message)
            )
            yield
        results.append(make.ReplicaElectionResult(topic=one.topic, partition_result=tuple(parts)))
    return make.ElectLeadersResponse(error_code=code, replica_election_results=tuple(results))


def _outcome(ctx: Context, topic: str, index: int, kind: int) -> tuple[ErrorCode, str | None]:
    if kind not in NO_LEADER_TO_BE:
        return ErrorCode.invalid_request, f"there is no election type {kind}"
    try:
        ctx.broker.metadata.having(topic, index)
    except DomainError as error:
        return error_code(error), str(error)
    if ctx.broker.logs.is_offline(topic, index):
        return NO_LEADER_TO_BE[kind], "the only replica is off line"
    return ErrorCode.election_not_needed, "the only replica leads"
