"""ElectLeaders (43): elect the preferred replica, or any live replica (unclean).

Version 1 adds the election type (KIP-460) and a top-level error; version 0 elects preferred
replicas.

Source: ``ReplicationControlManager.electLeaders``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Final

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.cluster.controller.machine import Controller
from fencepost.cluster.controller.partition_change import Election
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.errors import InvalidRequestError
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import each_row
from fencepost.coordinator.handlers.controller_decisions import (
    ITEMS_PER_TURN,
    batched,
    decided_each,
)
from fencepost.coordinator.runtime.turns import Work
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps

PREFERRED, UNCLEAN = 0, 1
_ELECTIONS: Final = {PREFERRED: Election.PREFERRED, UNCLEAN: Election.UNCLEAN}
NO_LEADER_TO_BE: Final = {
    PREFERRED: ErrorCode.preferred_leader_not_available,
    UNCLEAN: ErrorCode.eligible_leaders_not_available,
}


def refused(ctx: Context, code: int, message: str | None) -> Steps[Entity]:
    """Refuse each named partition for the same reason; a request for all partitions names none."""
    make = ctx.respond
    results = []
    for topic_request in ctx.body.topic_partitions or ():
        parts = yield from each_row(
            topic_request.partitions,
            lambda index: make.PartitionResult(
                partition_id=index, error_code=code, error_message=message
            ),
        )
        results.append(
            make.ReplicaElectionResult(topic=topic_request.topic, partition_result=parts)
        )
    return make.ElectLeadersResponse(error_code=code, replica_election_results=tuple(results))


@handles(ApiKey.ELECT_LEADERS, versions=(0, 2), permission="ALTER Cluster", refused=refused)
def run(ctx: Context) -> Work[Entity]:
    """Respond with the result of each partition.

    The response to a request for all partitions omits partitions that needed no election.
    """
    make, body = ctx.respond, ctx.body
    kind = getattr(body, "election_type", PREFERRED)
    ctx.require_on_cluster(Operation.ALTER)
    everything = body.topic_partitions is None
    named: Iterable[tuple[str, Sequence[int]]] = (
        ((topic.name, range(len(topic.partitions))) for topic in ctx.metadata.topics.values())
        if everything
        else (
            (topic_partition.topic, topic_partition.partitions)
            for topic_partition in body.topic_partitions
        )
    )
    topics: list[tuple[str, Sequence[int]]] = []
    partitions: list[tuple[str, int]] = []
    for topic, indexes in named:
        topics.append((topic, indexes))
        partitions += ((topic, index) for index in indexes)
        yield None
    if kind not in _ELECTIONS:
        if not topics and not everything:
            return make.ElectLeadersResponse(error_code=ErrorCode.none, replica_election_results=())
        raise InvalidRequestError(f"there is no election type {kind}")
    answers = yield from decided_each(
        ctx,
        (
            partial(Controller.elect_leaders, election=_ELECTIONS[kind], partitions=batch)
            for batch in batched(partitions, ITEMS_PER_TURN)
        ),
    )
    outcomes = chain.from_iterable(answers)
    # A topic that is named twice gets two results, as in Kafka.
    results = []
    for topic, indexes in topics:
        parts = []
        for index, (_, error) in zip(indexes, outcomes, strict=False):
            code, message = _error_of(ctx, topic, index, kind, error)
            if not (everything and code is ErrorCode.election_not_needed):
                parts.append(
                    make.PartitionResult(partition_id=index, error_code=code, error_message=message)
                )
            yield None
        results.append(make.ReplicaElectionResult(topic=topic, partition_result=tuple(parts)))
        yield None
    return make.ElectLeadersResponse(
        error_code=ErrorCode.none, replica_election_results=tuple(results)
    )


def _error_of(
    ctx: Context, topic: str, index: int, kind: int, error: DomainError | None
) -> tuple[ErrorCode, str | None]:
    if error is None:
        return ErrorCode.none, None
    code = error_code(error)
    if code is ErrorCode.election_not_needed and ctx.broker.logs.is_offline(topic, index):
        # The controller has not learned of the failed log directory yet.
        return NO_LEADER_TO_BE[kind], "the only replica is off line"
    return code, str(error)
